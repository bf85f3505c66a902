import json
from pathlib import Path

import numpy as np
import pytest
from tiny import FAMILIES, save

from tokenweave.bench.throughput import workload
from tokenweave.cli.main import main


def test_lengths() -> None:
    assert workload("512,128", 3, seed=0) == [(512, 128)] * 3
    drawn = np.array(workload("sharegpt", 4000, seed=0))
    assert drawn.min() >= 4 and drawn.max() <= 1024
    assert drawn.tolist() == [list(pair) for pair in workload("sharegpt", 4000, seed=0)]
    # cutting at 1024 takes a little off the means, 161 and 338
    assert 145 < drawn[:, 0].mean() < 165 and 270 < drawn[:, 1].mean() < 330
    assert np.median(drawn[:, 0]) == pytest.approx(161 / np.exp(0.5), rel=0.06)


@pytest.mark.parametrize("name", ["512", "512,0", "0,1", "a,b", "1,2,3", "-1,2", ""])
def test_refused_workloads(name: str) -> None:
    with pytest.raises(ValueError, match="a workload is INPUT,OUTPUT in tokens or sharegpt"):
        workload(name, 1, seed=0)


def test_modes_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, figures = save(FAMILIES[0], tmp_path), tmp_path / "figures.json"
    asked = ["--tp", "1", "--workload", "5,3", "9,2", "--requests", "3", "--rounds", "2", "--rate", "1000"]
    assert main(["bench", "throughput", str(model), *asked, "--json", str(figures)]) == 0
    rows = json.loads(figures.read_text())
    rows = rows["rows"] if isinstance(rows, dict) else rows
    assert [(row["workload"], row["mode"]) for row in rows] == [
        ("5,3", "serial"), ("5,3", "fused"), ("9,2", "serial"), ("9,2", "fused"),
    ]  # fmt: skip
    for row in rows:
        given, asked_for = map(int, row["workload"].split(","))
        assert row["tokens/s"] == pytest.approx(row["new tokens/s"] * (given + asked_for) / asked_for)
        assert 0 < row["TTFT p50 ms"] <= row["TTFT p99 ms"] and 0 < row["ITL p50 ms"] <= row["ITL p99 ms"]
        assert 0 < row["host ms"] < 1000
    assert "3 requests, 1000.0 a second, at most 2048 tokens a step; 2 interleaved rounds" in capsys.readouterr().out
