"""bench network: what it refuses; the measurement itself, marked `network`, between two real namespaces."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny import FAMILIES, save

from tokenweave.bench import namespaces, network


def test_what_the_machine_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(ValueError, match="need iproute2"):
        namespaces.NetworkRanks("none", {})
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match="need root"):
        namespaces.NetworkRanks("none", {})


@pytest.mark.parametrize("words", [["--tokens", "1"], ["--rates", "0"], ["--rounds", "4"]])
def test_refuses(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    network.add_arguments(parser)
    with pytest.raises(ValueError, match="--tokens must be at least 2, --rates more than 0, --rounds at least 5"):
        network.run(parser.parse_args(words))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(FAMILIES[0], tmp_path_factory.mktemp("network"))


def network_namespaces() -> set[str]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(process / "ns" / "net"))
        except OSError:
            continue
    return found


def command(model: Path, *more: str) -> list[str]:
    words = ["bench", "network", str(model), "--dtype", "float32", "--tokens", "33", "64", "--rounds", "5", *more]
    return [sys.executable, "-m", "tokenweave.cli.main", *words]


@pytest.mark.network
def test_measures_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    before = network_namespaces()
    files = ["--json", str(tmp_path / "found.json"), "--plot", str(tmp_path / "plot.png")]
    done = subprocess.run(command(model, "--rates", "20", "1000", *files), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["Mbit/s"], row["tokens"]) for row in rows] == [(20, 33), (20, 64), (1000, 33), (1000, 64)]
    for row in rows:
        assert 0 < row["cut"] < row["tokens"]
        assert row["bound"] == max(row["compute"], row["communication"]) > 0
    slow, fast = rows[1]["communication"], rows[3]["communication"]
    bits = 7 * 64 * 64 * 4 * 8  # stages, tokens, hidden size; partials to their owners and results back, half each
    least = 1e3 * (bits - 8 * namespaces.BUCKET) / 20e6  # what the bucket holds passes at once
    assert slow > least > fast, "the link is as slow as it was told to be, and then as fast"
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert network_namespaces() <= before


@pytest.mark.network
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_what_is_killed(model: Path, how: signal.Signals) -> None:
    before = network_namespaces()
    process = subprocess.Popen(command(model, "--rates", "0.5"), stderr=subprocess.DEVNULL)  # minutes a step
    deadline = time.monotonic() + 30
    while len(network_namespaces() - before) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(5.0)  # in the middle of a step
    process.send_signal(how)
    process.wait(20)
    while network_namespaces() - before:
        assert time.monotonic() < deadline + 20, "namespaces are left"
        time.sleep(0.1)
