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


@pytest.mark.parametrize("collective", ("auto", "symmetric"))
def test_gpus_reach_each_others_memory(collective: str) -> None:
    assert choose(collective, "cuda") == "symmetric"


def test_an_emulated_rank_is_asked_for_by_name() -> None:
    assert choose("emulated", "cuda") == "emulated"
    with pytest.raises(ValueError, match="emulated"):
        choose("emulated", "cpu")


@pytest.mark.parametrize(
    "arguments, words",
    (
        ({"collective": "smoke"}, "auto, shared_memory, distributed, got 'smoke'"),
        ({"device": "tpu"}, "'tpu'"),
        ({"collective": "shared_memory", "one_caller": False}, "cannot be used here: its ranks must be started on one"),
    ),
)
def test_what_cannot_be_chosen(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose(**arguments)  # type: ignore[arg-type]
