"""Ranks that run steps of the caller's making."""

import os
from pathlib import Path

import pytest
from tiny import FAMILIES, save

from tokenweave.engine.config import EngineConfig
from tokenweave.engine.trials import TrialRanks
from tokenweave.plan.step import StepPlan
from tokenweave.plan.trial import Trial

FUSED = (StepPlan("fused"),)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(FAMILIES[0], tmp_path_factory.mktemp("trials"))


def gone(ranks: TrialRanks) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in ranks._ranks.pids)


def test_steps_are_run_and_the_ranks_end(model: Path) -> None:
    with TrialRanks(model, EngineConfig(tensor_parallel_size=2), max_tokens=64) as ranks:
        assert ranks.key.tensor_parallel_size == 2 and ranks.key.dtype == "float32"
        assert ranks.context == 512  # the model's
        for tokens in (1, 33, 512):
            trial = Trial(counts=(tokens,), contexts=(tokens,), plans=FUSED, rounds=2)
            assert ranks.run(trial).steps.shape == (1, 2)
    assert gone(ranks)


def test_what_cannot_be_run_is_an_error_and_ends_the_ranks(model: Path) -> None:
    ranks = TrialRanks(model, EngineConfig(tensor_parallel_size=2), max_tokens=64)
    with pytest.raises(ValueError, match="blocks"), ranks:
        ranks.run(Trial(counts=(1,), contexts=(1_000_000,), plans=FUSED, rounds=1))
    assert gone(ranks)


def test_bad_input(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such model"):
        TrialRanks(tmp_path / "none", EngineConfig(), max_tokens=64)
    with pytest.raises(ValueError, match="5"):
        TrialRanks(model, EngineConfig(tensor_parallel_size=5), max_tokens=64)
