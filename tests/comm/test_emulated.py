"""An emulated rank: what it is held back to, without a GPU; what it computes, on one."""

import comm_oracle as oracle
import pytest
import torch

from tokenweave.bench.emulation import published_emulation
from tokenweave.cli.main import main
from tokenweave.comm.emulated import Emulation, emulated_group
from tokenweave.comm.operations import Operation
from tokenweave.comm.processes import start_ranks

FUSED = Operation.ALL_REDUCE_ADD_RMS_NORM
EPS = 1e-5


def emulation(**changed: object) -> Emulation:
    paces = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), lambda tokens: 2.0 * tokens)
    fused = {4: lambda tokens: 4.0 * tokens, 16: lambda tokens: 1.0 * tokens}
    return Emulation(**{"size": 8, "traffic": "p2p", "fused": fused, **paces, **changed})


@pytest.mark.parametrize("budget, seconds", ((1, 40.0), (4, 40.0), (8, 25.0), (16, 10.0), (64, 10.0)))
def test_the_fused_pace_by_thread_blocks(budget: int, seconds: float) -> None:
    assert emulation().seconds(FUSED, 10, budget) == pytest.approx(seconds)


def test_other_paces() -> None:
    assert emulation(link_seconds=9.0).seconds(FUSED, 10, 16) == 90.0
    assert emulation(link_seconds=9.0).seconds(Operation.ALL_REDUCE, 10, 16) == 20.0


@pytest.mark.parametrize("changed", ({"size": 0}, {"traffic": "smoke"}, {"fused": {}}, {"fused": {0: abs}}))
def test_what_cannot_be_emulated(changed: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(changed))):
        emulation(**changed)


def test_published_times() -> None:
    """Figures of the published table, by hand: [8192, 8192] bf16."""
    multicast = published_emulation(size=8, hidden_size=8192)
    assert multicast.seconds(FUSED, 8192, 8) == pytest.approx(561.7e-6)
    assert multicast.seconds(FUSED, 1024, 16) == pytest.approx(75.4e-6)
    p2p = published_emulation(size=8, hidden_size=8192, traffic="p2p")
    assert p2p.seconds(FUSED, 8192, 8) == pytest.approx(561.7e-6)
    assert p2p.seconds(FUSED, 8192, 16) == pytest.approx(2 * 7 / 8 * 8192 * 16384 / 450e9)  # the link takes longer
    assert p2p.seconds(Operation.ALL_REDUCE, 64, 1) == pytest.approx(36e-6)
    slower = published_emulation(size=8, hidden_size=8192, slower=1.2)
    assert slower.seconds(FUSED, 8192, 8) == pytest.approx(1.2 * 561.7e-6)
    smaller = published_emulation(size=8, hidden_size=4096)
    assert smaller.seconds(FUSED, 8192, 8) == pytest.approx(290.8e-6)  # as 4096 rows of 8192
    with pytest.raises(ValueError, match="8 ranks, got 4"):
        published_emulation(size=4, hidden_size=8192)


def test_it_goes_with_its_collective() -> None:
    with pytest.raises(ValueError, match="is for tune and the benchmarks"):
        start_ranks("os:getpid", 8, collective="emulated", device="cuda")
    with pytest.raises(ValueError, match="needs the collective 'emulated', got 'auto'"):
        start_ranks("os:getpid", 8, device="cuda", emulation=emulation())


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU that torch can use; there is none"):
        emulated_group(emulation())
    assert main(["bench", "layer", "--emulate-tp", "8"]) == 2
    assert "needs a GPU that torch can use; there is none" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("traffic", ("p2p", "multicast"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("hidden, tokens", ((64, 5), (576, 577), (4096, 128), (8192, 577)))
def test_its_rows_are_those_of_the_shares_it_has(hidden: int, tokens: int, dtype: torch.dtype, traffic: str) -> None:
    def nothing(tokens: float) -> float:
        return 0.0

    unpaced = emulation(
        traffic=traffic, fused={1: nothing}, all_reduce=nothing, reduce_scatter=nothing, all_gather=nothing
    )
    own = tokens // 8
    starts = [tokens * rank // 8 for rank in range(8 if traffic == "p2p" else 1)]
    with emulated_group(unpaced) as group, group.open_collective(hidden, tokens, dtype, lanes=2) as collective:
        for wide in (True, False):
            buffer = collective.buffer(1, tokens).normal_()
            shares = [buffer[start : start + own].clone() for start in starts]
            residual = torch.randn(own, hidden, device="cuda").to(dtype)
            weight = torch.randn(hidden, device="cuda").to(torch.float32 if wide else dtype)
            want_residual, want = oracle.fused(shares, residual.clone(), weight, EPS)
            x = collective.all_reduce_add_rms_norm(buffer, residual, weight, EPS, lane=1, budget=3)
            assert torch.equal(residual, want_residual)
            for start in starts:
                tolerance = oracle.tolerance(dtype)
                assert torch.allclose(
                    x[start : start + own].double(), want.double(), rtol=tolerance, atol=1e-3 * tolerance
                )
