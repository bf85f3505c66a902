"""bench cross-entropy: the figures it gives, at a tiny size on the CPU; and that what stands in for ranks adds up."""

import argparse
import json
import math
from pathlib import Path

import pytest
import torch

from tokenweave.bench import cross_entropy
from tokenweave.cli.main import main
from tokenweave.layers.cross_entropy import Vocabulary, vocab_parallel_cross_entropy

TINY = ["--device", "cpu", "--tokens", "13", "--vocabulary", "77", "--ranks", "3", "--hidden", "16", "--chunks", "5"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, figures = tmp_path / "figures.png", tmp_path / "figures.json"
    assert main(["bench", "cross-entropy", *TINY, "--json", str(figures), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(figures.read_text())["rows"]
    names = [row["forward and backward"] for row in rows]
    assert names == ["ours", "torch, gathered logits", "head and loss, chunks of 5"]
    assert all(row["ms"] > 0 and row["peak MiB"] is None for row in rows)
    assert rows[1]["÷ torch's"] == 1.0 and "rank 0 of 3" in capsys.readouterr().out


def test_ranks_that_stand_in() -> None:
    """Three ranks with the same 5 logits: the softmax of all 15, without the target that each would hold."""
    own = torch.randn(2, 5, dtype=torch.float32)
    vocabulary = Vocabulary(15, slice(0, 5), 3, cross_entropy._Others(3), 2)  # type: ignore[arg-type]
    found = vocab_parallel_cross_entropy(own.clone(), torch.tensor([7, 8]), vocabulary)
    torch.testing.assert_close(found, own.double().logsumexp(1).float() + math.log(3))


@pytest.mark.parametrize("wrong", [["--repeats", "30"], ["--tokens", "0"], ["--vocabulary", "2"], ["--chunks", "0"]])
def test_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cross-entropy", *TINY, *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Less than 0.35 of the memory of torch's loss over gathered logits, at an eighth of the sizes that models have."""
    parser = argparse.ArgumentParser()
    cross_entropy.add_arguments(parser)
    rows = cross_entropy.measure(parser.parse_args(["--tokens", "1024", "--vocabulary", "32064", "--chunks", "256"]))
    assert rows[0]["peak MiB"] <= 0.35 * rows[1]["peak MiB"]
