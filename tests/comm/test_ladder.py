"""Which collective is chosen, and what is said of one that is not."""

import pytest

from tokenweave.comm.ladder import choose, ladder


def test_the_highest_usable_rung_is_chosen() -> None:
    assert choose() == "shared_memory"
    assert choose(one_caller=False) == "distributed"
    assert choose("distributed") == "distributed"
    assert choose("shared_memory") == "shared_memory"


def test_a_rung_that_is_not_usable_says_why() -> None:
    assert [rung.name for rung in ladder()] == ["shared_memory", "distributed"]
    assert [rung.obstacle for rung in ladder()] == [None, None]
    assert "one host" in str(ladder(one_caller=False)[0].obstacle)


def test_the_ranks_see_their_gpus_and_choose() -> None:
    assert choose("auto", "cuda") == "auto"
    assert [choose(name, "cuda") for name in ("symmetric", "distributed")] == ["symmetric", "distributed"]


def test_ranks_on_gpus_that_others_have_started_go_by_nccl() -> None:
    assert choose("auto", "cuda", one_caller=False) == choose("distributed", "cuda", one_caller=False) == "distributed"
    assert [rung.name for rung in ladder("cuda")] == ["symmetric", "distributed"]


def test_an_emulated_rank_is_asked_for_by_name() -> None:
    assert choose("emulated", "cuda") == "emulated"


@pytest.mark.parametrize(
    "arguments, words",
    (
        ({"collective": "smoke"}, "auto, shared_memory, distributed, got 'smoke'"),
        ({"device": "tpu"}, "'tpu'"),
        (
            {"collective": "symmetric"},
            "'symmetric' is for ranks on GPUs; on CPUs it can be auto, shared_memory or ",
        ),
        ({"collective": "emulated"}, "'emulated' is for ranks on GPUs"),
        (
            {"collective": "shared_memory", "device": "cuda"},
            "on CPUs; on GPUs it can be auto, symmetric or",
        ),
        ({"collective": "symmetric", "device": "cuda", "one_caller": False}, "cannot be used here: its ranks must be"),
        ({"collective": "shared_memory", "one_caller": False}, "cannot be used here: its ranks must be started on one"),
    ),
)
def test_what_cannot_be_chosen(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose(**arguments)  # type: ignore[arg-type]
