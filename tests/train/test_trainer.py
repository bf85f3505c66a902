"""A Trainer's steps where the loss is not finite, and its collectives."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import FAMILIES, save
from train.train_ranks import Case, make_trainer

from tokenweave.comm import Group, launch
from tokenweave.train.config import TrainingConfig
from tokenweave.train.run import Diverged

BIASED = next(tiny for tiny in FAMILIES if tiny.name == "llama-bias")


@pytest.fixture
def case(tmp_path: Path) -> Case:
    windows = np.random.default_rng(1).integers(0, 30, (2, 8))
    return Case(save(BIASED, tmp_path), windows, TrainingConfig(batch_size=2, length=7))


def refused(group: Group, case: Case) -> tuple[str, bool]:
    """What a step with a weight that is NaN says, and whether it has left the weights and the moments as they were."""
    trainer = make_trainer(group, case)
    trainer.step(case.windows, 0)
    optimizer = trainer.optimizer
    if group.rank == group.size - 1:
        optimizer.masters[-1].view(-1)[-1] = torch.nan
    states = [*optimizer.masters, *optimizer.first, *optimizer.second]
    before = [tensor.clone() for tensor in states]
    try:
        trainer.step(case.windows, 1)
        said = "nothing"
    except Diverged as error:
        said = str(error)
    same = (torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(before, states, strict=True))
    return said, all(same)


@pytest.mark.parametrize("size", [1, 3])
def test_a_loss_that_is_not_finite_changes_nothing(size: int, case: Case) -> None:
    expected = "at step 2 the loss is nan and the norm of its gradient nan"
    assert launch(refused, size, args=(case,)) == [(expected, True)] * size


def finite(group: Group, case: Case) -> list[bool]:
    """Before and after one number of the last rank's is infinite, in each of the three states."""
    trainer = make_trainer(group, case)
    found = [trainer.finite()]
    for tensors in (trainer.optimizer.masters, trainer.optimizer.first, trainer.optimizer.second):
        place = tensors[0].view(-1)[-1:]
        had = place.clone()
        if group.rank == group.size - 1:
            place.fill_(-torch.inf)
        found.append(trainer.finite())
        place.copy_(had)
    return [*found, trainer.finite()]


@pytest.mark.parametrize("size", [1, 3])
def test_all_ranks_know_that_one_is_not_finite(size: int, case: Case) -> None:
    assert launch(finite, size, args=(case,)) == [[True, False, False, False, True]] * size


def closed(group: Group, case: Case) -> list[str]:
    """What each collective says after the trainer is closed."""
    with make_trainer(group, case) as trainer:
        trainer.step(case.windows, 0)
    said = []
    for collective in (trainer.collective, trainer.sums, trainer.vocabulary.collective):
        with pytest.raises(RuntimeError) as caught:
            collective.barrier()
        said.append(str(caught.value))
    return said


def test_closing(case: Case) -> None:
    assert launch(closed, 2, args=(case,)) == [["the collective is closed"] * 3] * 2
