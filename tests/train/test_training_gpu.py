"""Training on a GPU, by one rank and by two that share it if they must, against the CPU's loss curve."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import FAMILIES, save
from train.train_ranks import Case, losses

from tokenweave.comm import launch
from tokenweave.train.config import TrainingConfig

STEPS, BATCH, LENGTH = 10, 4, 13
VARIANTS: list[dict[str, Any]] = [
    {"sequence_parallel": True},
    {"sequence_parallel": False},
    {"recompute": True, "accumulation": 2, "label_smoothing": 0.1},
]


def cases(directory: Path) -> list[Case]:
    windows = np.random.default_rng(0).integers(0, 509, (STEPS * BATCH, LENGTH + 1))
    paths = [save(tiny, directory) for tiny in FAMILIES if tiny.name in ("llama-bias", "qwen2-tied", "mixtral")]
    common = {"steps": STEPS, "batch_size": BATCH, "length": LENGTH, "warmup_steps": 2, "learning_rate": 2e-3}
    return [Case(path, windows, TrainingConfig(**common | variant)) for path in paths for variant in VARIANTS]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2])
def test_loss_curves_equal_the_cpus(size: int, tmp_path: Path) -> None:
    made = cases(tmp_path)
    expected = launch(losses, 1, "shared_memory", args=(made,))[0]
    for found in launch(losses, size, device="cuda", args=(made,)):
        for case, curve, reference in zip(made, found, expected, strict=True):
            assert curve == pytest.approx(reference, rel=1e-4), (case.directory.name, case.config)
            assert curve[-1] != curve[0]
