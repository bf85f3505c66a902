"""What `tokenweave doctor` says of GPUs, here made up."""

import argparse

import pytest

from tokenweave.cli import doctor
from tokenweave.comm.devices import Gpu


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], peers: dict[int, set[int]]) -> list[str]:
    """The lines on collectives for GPUs that reach the memory of these."""
    gpus = [Gpu("a", n, "NVIDIA H100", (9, 0), frozenset(reached), False) for n, reached in peers.items()]
    monkeypatch.setattr(doctor, "gpus_here", lambda: gpus)
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    assert doctor.run(argparse.Namespace()) == 0
    _, _, found = capsys.readouterr().out.partition("ranks on the GPUs, one each, best first:\n")
    return [" ".join(line.split()) for line in found.splitlines()]


def test_gpus_that_reach_each_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    multicast, *rest = said(monkeypatch, capsys, {0: {1}, 1: {0}})
    assert multicast.startswith("symmetric, multicast GPU 0 (NVIDIA H100) has no multicast")
    assert rest == ["symmetric, p2p chosen", "distributed, NCCL also possible"]


def test_gpus_that_do_not_say_why_and_what_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "GPU 0 cannot reach the memory of GPU 1 (no P2P between them)"
    assert said(monkeypatch, capsys, {0: set(), 1: set()}) == [
        f"symmetric, multicast {why}", f"symmetric, p2p {why}", "distributed, NCCL chosen",
    ]  # fmt: skip


def test_without_gpus_there_is_nothing_to_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(monkeypatch, capsys, {}) == []
