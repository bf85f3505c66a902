"""bench load: what is counted, on a small file."""

import json
from pathlib import Path

import pytest
import torch

from tokenweave.bench.load import write_random
from tokenweave.cli.main import main
from tokenweave.config.foreign import read_config
from tokenweave.models.checkpoint import Checkpoint


@pytest.mark.parametrize("gigabytes", [0.1, 0.6])
def test_random_weights_are_of_the_size_asked_for(gigabytes: float, tmp_path: Path) -> None:
    write_random(tmp_path, gigabytes)
    size = (tmp_path / "model.safetensors").stat().st_size / 1e9
    assert abs(size - max(gigabytes, 0.38)) < 0.08
    assert read_config(tmp_path).dtype == "bfloat16" and Checkpoint(tmp_path).dtype("lm_head.weight") == torch.bfloat16


def test_each_rank_reads_its_own_bytes_and_no_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_random(tmp_path, 0.1)
    assert (
        main(["bench", "load", str(tmp_path), "--tp", "2", "--rounds", "1", "--json", str(tmp_path / "out.json")]) == 0
    )
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["rank"] for row in rows] == [0, 1] and all(row["bytes_read"] == row["bytes_held"] for row in rows)
    whole = (tmp_path / "model.safetensors").stat().st_size
    assert whole * 0.99 < sum(row["bytes_read"] for row in rows) < whole * 1.01
    assert all(row["load"] > 0 and row["read"] > 0 for row in rows)
    assert "load ÷ read" in capsys.readouterr().out
