"""bench comm: what it counts, and the whole command at a small size."""

import argparse
import json
from pathlib import Path

import pytest

from tokenweave.bench import comm


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    comm.add_arguments(parser)
    return parser.parse_args(words)


def test_bytes_of_two_ranks() -> None:
    """In rows of T: fused reads 2 halves and a half of residual, and writes as much."""
    assert [comm.bytes_moved(mode, 8, 2, 10) for mode in ("serial", "reordered", "fused")] == [480, 400, 240]
    assert comm.bytes_moved(comm.PRIVATE, 8, 2, 10) == 320


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    args = parsed(
        "--tokens", "1", "5", "--hidden", "64", "--repeats", "31", "--json", str(figures), "--plot", str(plot)
    )
    assert comm.run(args) == 0
    rows = json.loads(figures.read_text())["rows"]
    cases = {(row["collective"], row["tokens"], row["mode"]) for row in rows}
    assert len(cases) == len(rows) == 2 * 2 * len(comm.MODES)
    assert all(row["µs"] > 0 for row in rows)
    assert sum(row["wins"] == "<" for row in rows) == 4
    assert plot.stat().st_size > 1000
    assert "shared_memory" in capsys.readouterr().out


@pytest.mark.parametrize("words", (("--repeats", "30"), ("--tp", "0"), ("--tokens", "0"), ("--hidden", "0")))
def test_what_cannot_be_measured(words: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="at least"):
        comm.run(parsed(*words))
