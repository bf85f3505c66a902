"""What keeps ranks on GPUs off a rung: each forced cause has its own line."""

from dataclasses import replace

import pytest

from tokenweave.comm.devices import Gpu, claim, gpu_ladder, gpu_rung

GPUS = [Gpu("a", n, "NVIDIA H100", (9, 0), frozenset({0, 1, 2, 3} - {n}), True) for n in range(4)]


def obstacles(gpus: list[Gpu], **environment: str) -> tuple[str | None, str | None]:
    multicast, p2p, nccl = (rung.obstacle for rung in gpu_ladder(gpus, environment))
    assert nccl == (None if gpus else "there is no GPU that torch can use")
    return multicast, p2p


def test_nothing_in_the_way() -> None:
    assert obstacles(GPUS) == (None, None)
    assert obstacles(GPUS, TORCH_SYMM_MEM_DISABLE_MULTICAST="0") == (None, None)


def test_multicast_disabled() -> None:
    multicast, p2p = obstacles(GPUS, TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    assert p2p is None and multicast is not None and "TORCH_SYMM_MEM_DISABLE_MULTICAST is set" in multicast


def test_one_gpu_without_multicast_takes_it_from_all() -> None:
    multicast, p2p = obstacles([*GPUS[:3], replace(GPUS[3], multicast=False)])
    assert p2p is None and multicast is not None and multicast.startswith("GPU 3 (NVIDIA H100) has no multicast")


def test_unequal_hosts() -> None:
    assert obstacles([*GPUS[:3], replace(GPUS[3], host="b")]) == ("the ranks are on different hosts: a, b",) * 2


def test_no_p2p() -> None:
    line = "GPU 2 cannot reach the memory of GPU 0 (no P2P between them)"
    assert obstacles([*GPUS[:2], replace(GPUS[2], peers=frozenset({1, 3})), GPUS[3]]) == (line, line)


def test_older_than_hopper() -> None:
    multicast, p2p = obstacles([replace(gpu, name="NVIDIA A100", capability=(8, 0)) for gpu in GPUS])
    assert p2p is None and multicast == "GPU 0 (NVIDIA A100) is older than Hopper"


def test_none_and_one() -> None:
    assert obstacles([]) == ("there is no GPU that torch can use",) * 2
    assert obstacles([replace(GPUS[0], peers=frozenset())]) == ("there is nobody to send to: one GPU", None)


def test_a_rank_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="there is none"):
        claim(0, 2, "auto")


@pytest.fixture
def third_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs, of which the last reaches no other."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda one, other: 2 not in (one, other))


@pytest.mark.usefixtures("third_alone")
def test_ranks_whose_gpus_reach_each_other_are_symmetric(capsys: pytest.CaptureFixture[str]) -> None:
    assert claim(1, 2, "auto").index == 1
    for asked in ("auto", "symmetric"):
        assert [gpu_rung(asked, rank, 2) for rank in range(2)] == ["symmetric"] * 2
    assert gpu_rung("distributed", 0, 2) == "distributed"
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("third_alone")
def test_ranks_whose_gpus_do_not_are_distributed_and_told_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert [gpu_rung("auto", rank, 3) for rank in range(3)] == ["distributed"] * 3
    why = "GPU 0 cannot reach the memory of GPU 2 (no P2P between them)"
    assert capsys.readouterr().err == f"tokenweave: collective distributed, not symmetric: {why}\n"
    with pytest.raises(ValueError, match="'symmetric' cannot be used here: GPU 0 cannot .*; 'distributed' can"):
        gpu_rung("symmetric", 0, 3)


@pytest.mark.usefixtures("third_alone")
def test_more_ranks_than_gpus_share_them_but_not_over_nccl() -> None:
    with pytest.raises(ValueError, match="needs a GPU for each rank, as NCCL does, and 4 ranks have 3"):
        claim(3, 4, "distributed")


@pytest.mark.usefixtures("third_alone")
def test_ranks_that_share_gpus_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenweave.comm.devices._SHARED", {})
    assert claim(3, 4, "auto").index == 0
    assert gpu_rung("auto", 3, 4) == gpu_rung("symmetric", 3, 4) == "symmetric"
