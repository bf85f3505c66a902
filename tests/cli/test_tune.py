"""tokenweave tune, and what an engine makes of the table that it keeps."""

import json
from pathlib import Path

import pytest
from tiny import FAMILIES, save

from tokenweave import LLM
from tokenweave.cli.main import main
from tokenweave.plan.planner import Planner
from tokenweave.plan.table import TunedTable, find


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(FAMILIES[0], tmp_path_factory.mktemp("tune"))


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tokenweave" / "plans"


def source(model: Path, mode: str = "auto", size: int = 2) -> str:
    with LLM(model, tensor_parallel_size=size, mode=mode) as llm:
        llm.generate([1, 2, 3])
        assert size == 1 or llm.stats()[0].mode == ("fused" if mode == "auto" else mode)
        return llm.plan_source


def test_a_table_is_kept_used_and_refused_when_stale(
    model: Path, plans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert source(model) == "not tuned here yet; calculated for cpu"
    figures = tmp_path / "figures.json"
    words = ["tune", str(model), "--tp", "2", "--tokens", "1,16,40", "--exhaustive", "--json", str(figures)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "shared_memory" in shown and "regret" in shown and str(plans) in shown
    (path,) = plans.iterdir()
    table = TunedTable.from_json(json.loads(path.read_text()))
    assert find(table.key, plans)[0] == table
    assert {sum(check.counts) for check in table.checks} == {1, 16, 40}
    assert all(Planner("auto", table).plan([n], [n]).mode in ("serial", "fused", "reordered") for n in (1, 5, 40, 99))
    written = json.loads(figures.read_text())
    assert [row["tokens"] for row in written["rows"]] == [row["tokens"] for row in written["regret"]] == [1, 16, 40]
    assert TunedTable.from_json(written["table"]) == table

    stale = table.to_json()
    stale["key"]["link_latency"] = 2.0
    path.write_text(json.dumps(stale))
    said = source(model)
    assert said.startswith("tuned elsewhere: link_latency is 2.0 there and ") and "calculated for cpu" in said
    path.write_text("{")
    assert "not usable" in source(model)

    assert main(["tune", str(model), "--tp", "1", "--tokens", "1,16"]) == 0
    (alone,) = set(plans.iterdir()) - {path}
    # At one rank, as between two a busy machine's link may look like another.
    assert source(model, size=1) == f"tuned: {alone}"


def test_a_mode_that_was_asked_for_is_kept(model: Path, plans: Path) -> None:
    assert "calculated" in source(model, "weave")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--tokens", "0"], "at least 1"),
        (["--tokens", "1,x"], "whole numbers"),
        (["--tp", "0"], "tensor_parallel_size"),
        (["--tp", "64"], "64"),
    ],
)
def test_bad_input(model: Path, plans: Path, words: list[str], error: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(model), *words]) == 2
    assert error in capfd.readouterr().err and not plans.exists()
