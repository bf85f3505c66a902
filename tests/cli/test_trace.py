"""tokenweave trace: both files, the table, and over a slow link that what is hidden is what is saved."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny import FAMILIES, save

from tokenweave.cli.main import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(FAMILIES[0], tmp_path_factory.mktemp("trace"))


def trace(model: Path | None, directory: Path, *more: str) -> dict[str, Any]:
    words = ["trace", *([str(model)] if model else []), *more]
    assert main([*words, "--trace", str(directory / "t.json"), "--plot", str(directory / "t.png")]) == 0
    assert (directory / "t.png").stat().st_size > 10_000
    return json.loads((directory / "t.json").read_text())


def figures(printed: str) -> dict[tuple[str, int], dict[str, float]]:
    """The table: {(mode, rank): {column: ms}}."""
    lines = [line for line in printed.splitlines() if line.startswith(("serial ", "fused ", "weave, "))]
    columns = ["step", "compute", "communication", "exposed", "slower", "hidden"]
    found = {}
    for line in lines:
        words = line.split()
        values = [float(word) for word in words[-6:]]
        found[words[0].rstrip(","), int(words[-7])] = dict(zip(columns, values, strict=True))
    return found


def test_prefill(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = trace(model, tmp_path, "--prefill", "33", "--tp", "2")
    printed = capsys.readouterr().out
    table = figures(printed)
    longer = sum(table["weave", rank]["step"] - table["fused", rank]["step"] for rank in (0, 1)) / 2
    said = re.search(r"a step takes ([0-9.]+) ms (less|more) than fused", printed)
    assert said and float(said[1]) * (1 if said[2] == "more" else -1) == pytest.approx(longer, abs=0.11)
    assert set(table) == {(mode, rank) for mode in ("serial", "fused", "weave") for rank in (0, 1)}
    for ms in table.values():
        assert ms["communication"] == pytest.approx(ms["hidden"] + ms["exposed"] + ms["slower"], abs=0.3)
        assert ms["step"] >= ms["compute"] - 0.1
    names = {e["pid"]: e["args"]["name"] for e in told["traceEvents"] if e["name"] == "process_name"}
    assert sorted(names.values()) == sorted(
        f"{mode} · rank {rank}" for mode in ("serial", "fused", "weave, cut at 16") for rank in (0, 1)
    )
    bars = [e for e in told["traceEvents"] if e["ph"] == "X"]
    assert all(bar["ts"] >= 0 and bar["dur"] >= 0 and bar["cat"] in ("compute", "communication") for bar in bars)
    woven = [bar for bar in bars if names[bar["pid"]] == "weave, cut at 16 · rank 1"]
    assert len(woven) == 2 * 2 * 7  # lanes, kinds, stages
    assert {bar["tid"] for bar in woven} == {0, 1}


def test_decode(model: Path, tmp_path: Path) -> None:
    told = trace(model, tmp_path, "--decode", "40", "--mode", "fused", "--tp", "1")
    assert len([e for e in told["traceEvents"] if e["ph"] == "X"]) == 2 * 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prefill", "0"], "tokens must be in [1, 512]"),
        (["--decode", "513"], "tokens must be in [1, 512]"),
        (["--link", "100", "--tp", "3"], "--link is between 2 ranks"),
        (["--link", "0"], "more than 0"),
        (["--link", "nan"], "more than 0"),
        (["--tp", "5"], "num_attention_heads"),
    ],
)
def test_refuses(model: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(model), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.network
def test_what_is_hidden_is_what_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """(fused - weave) ÷ communication in fused, of the demo model over 1 Gbit/s, both ranks together."""
    trace(None, tmp_path, "--prefill", "1024", "--dtype", "bfloat16", "--link", "1000", "--mode", "fused", "weave")
    table = figures(capsys.readouterr().out)

    def total(mode: str, what: str) -> float:
        return sum(table[mode, rank][what] for rank in (0, 1))

    hidden = total("weave", "hidden") / total("weave", "communication")
    saved = (total("fused", "step") - total("weave", "step")) / total("fused", "communication")
    assert hidden == pytest.approx(saved, rel=0.1)
