"""bench step: modes of one step side by side."""

import json
from pathlib import Path

import pytest
from tiny import FAMILIES, save

from tokenweave.cli.main import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(FAMILIES[0], tmp_path_factory.mktemp("step"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_figures(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plot = tmp_path / "step.json", tmp_path / "step.png"
    words = ["--mode", "auto", "serial", "weave", "--tokens", "1", "13", "--rounds", "5"]
    assert main(["bench", "step", str(model), *words, "--json", str(file), "--plot", str(plot)]) == 0
    rows = json.loads(file.read_text())["rows"]
    modes = ("auto", "serial", "weave")
    assert [(row["tokens"], row["mode"]) for row in rows] == [(n, mode) for n in (1, 13) for mode in modes]
    assert all(row["ms"] > 0 and row["ratio"] > 0 and row["rounds"] >= 5 for row in rows)
    assert all(row["ratio"] == 1.0 for row in rows if row["mode"] == "auto")
    assert rows[-1]["plan"] == "weave 6" and plot.stat().st_size > 0
    shown = capsys.readouterr().out
    assert "shared_memory" in shown and "not tuned here yet" in shown


def test_decodes(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    words = ["--mode", "fused", "serial", "--tokens", "3", "--decode", "500", "--rounds", "5", "--json", str(file)]
    assert main(["bench", "step", str(model), *words]) == 0
    assert len(json.loads(file.read_text())["rows"]) == 2


@pytest.mark.parametrize("words", [["--tokens", "0"], ["--rounds", "2"], ["--decode", "0"], ["--decode", "100000"]])
def test_refuses(model: Path, words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", str(model), "--tokens", "1", *words]) == 2
    assert "error:" in capfd.readouterr().err
