"""TrainingConfig and Run: what they refuse, and the learning rate of each step."""

import math
from pathlib import Path
from typing import Any

import pytest

from tokenweave.train.config import TrainingConfig, head_chunk
from tokenweave.train.run import Run
from tokenweave.train.schedule import learning_rate


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0}, {"batch_size": 0}, {"length": 0}, {"accumulation": 0}, {"batch_size": 4, "accumulation": 3},
        {"learning_rate": 0.0}, {"clip_norm": 0.0}, {"epsilon": 0.0}, {"final_learning_rate": -1.0},
        {"warmup_steps": -1}, {"weight_decay": -0.1}, {"beta1": 1.0}, {"beta2": -0.1}, {"label_smoothing": 1.0},
        {"z_loss": -1.0}, {"dtype": "float16"}, {"seed": -1},
    ],
)  # fmt: skip
def test_what_a_config_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=list(wrong)[-1]):
        TrainingConfig(**wrong)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name",
    [
        "learning_rate", "final_learning_rate", "weight_decay", "beta1", "beta2", "epsilon", "clip_norm",
        "label_smoothing", "z_loss",
    ],
)  # fmt: skip
def test_settings_are_finite(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be finite, got {value}$"):
        TrainingConfig(**{name: value})


@pytest.mark.parametrize(
    "wrong",
    [{"held_out": math.nan}, {"held_out": 0.0}, {"held_out": 1.0}, {"evaluate_every": 0}, {"checkpoint_every": 0}],
)
def test_what_a_run_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Run(out=Path("x"), **wrong)


def test_warm_up_and_cosine() -> None:
    config = TrainingConfig(steps=21, warmup_steps=4, learning_rate=1.0, final_learning_rate=0.2)
    rates = [learning_rate(config, step) for step in range(21)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[12] == pytest.approx(0.6) and rates[20] == pytest.approx(0.2)
    assert rates[8] == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi / 4)))
    assert learning_rate(TrainingConfig(steps=1, warmup_steps=0, learning_rate=1.0), 0) == 1.0


def test_chunks_of_logits() -> None:
    assert head_chunk(100000, 1024) == 1024
    assert head_chunk(10, 1024) == 10
    assert head_chunk(100000, 151936) == 16
