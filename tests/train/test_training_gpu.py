"""Training on a GPU, by one rank and by two that share it if they must: the CPU's loss curve, and the plan's memory."""

from typing import Any

import numpy as np
import pytest
from tiny import FAMILIES, save
from train.test_training_memory import CONFIG, planned
from train.train_ranks import Case, losses

from tokenweave.comm import launch
from tokenweave.comm.processes import start_ranks
from tokenweave.train.config import TrainingConfig

STEPS, BATCH, LENGTH = 6, 4, 13
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama-bias", {"sequence_parallel": True}),
    ("llama-bias", {"recompute": True, "accumulation": 2, "label_smoothing": 0.1}),
    ("qwen2-tied", {"sequence_parallel": False}),
    ("mixtral", {"recompute": True}),
]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    directory = tmp_path_factory.mktemp("models")
    windows = np.random.default_rng(0).integers(0, 509, (STEPS * BATCH, LENGTH + 1))
    paths = {tiny.name: save(tiny, directory) for tiny in FAMILIES if tiny.name in dict(VARIANTS)}
    common = {"steps": STEPS, "batch_size": BATCH, "length": LENGTH, "warmup_steps": 2, "learning_rate": 2e-3}
    return [Case(paths[name], windows, TrainingConfig(**common | settings)) for name, settings in VARIANTS]


@pytest.fixture(scope="module")
def expected(cases: list[Case]) -> list[list[float]]:
    return launch(losses, 1, "shared_memory", args=(cases,))[0]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2])
def test_loss_curves_equal_the_cpus(size: int, cases: list[Case], expected: list[list[float]]) -> None:
    for found in launch(losses, size, device="cuda", args=(cases,)):
        for case, curve, reference in zip(cases, found, expected, strict=True):
            assert curve == pytest.approx(reference, rel=1e-4), (case.directory.name, case.config)
            assert curve[-1] != curve[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_the_plans(dtype: str) -> None:
    training = TrainingConfig(steps=2, batch_size=8, length=256, dtype=dtype)
    plan = planned(CONFIG, 1, training, device="cuda")
    with start_ranks("train.memory_ranks:train", 1, (CONFIG, training), device="cuda") as ranks:
        (found,) = ranks.results()
    assert found.weights + found.gradients + found.optimizer == pytest.approx(plan.states, rel=0.05)
    assert found.peak == pytest.approx(plan.peak, rel=0.15)
