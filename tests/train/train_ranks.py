"""What the ranks of the training tests run: many cases in one start."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenweave.comm import Group
from tokenweave.config import shard
from tokenweave.config.foreign import read_config
from tokenweave.models.loading import load_model
from tokenweave.train.config import TrainingConfig
from tokenweave.train.trainer import Trainer


@dataclass(frozen=True)
class Case:
    """A checkpoint, windows [steps * batch_size, length + 1], and how to train on them."""

    directory: Path
    windows: np.ndarray
    config: TrainingConfig
    fault: str = ""


def make_trainer(group: Group, case: Case) -> Trainer:
    dtype = getattr(torch, case.config.dtype)
    device = str(group.device)
    model = load_model(case.directory, rank=group.rank, size=group.size, dtype=dtype, device=device)
    trainer = Trainer(group, model, case.config)
    if case.fault:
        plant(trainer, case.fault)
    return trainer


def gradients(group: Group, cases: list[Case]) -> list[dict[str, Any]]:
    """For each case that the model can be split for: loss, norm, and this rank's (name, dim, part, gradient)."""
    found = []
    for case in cases:
        try:
            shard(read_config(case.directory), group.size, group.rank)
        except ValueError:
            found.append({})
            continue
        trainer = make_trainer(group, case)
        loss = 0.0
        for part in np.split(case.windows, case.config.accumulation):
            loss += trainer.backward(part, count=case.windows.shape[0] * case.config.length)
            trainer.gradients.accumulate()
        norm = trainer.gradients.reduce()
        tensors = {id(p): t for p, t in zip(trainer.gradients.parameters, trainer.gradients.tensors, strict=True)}
        own = [
            (part.name, part.piece.dim, part.piece.part, part.of(tensors[id(part.parameter)]).float().clone())
            for part in trainer.parts
        ]
        found.append({"loss": loss, "norm": norm, "gradients": own})
    return found


def losses(group: Group, cases: list[Case]) -> list[list[float]]:
    """Each case's loss curve."""
    curves = []
    for case in cases:
        trainer, batch = make_trainer(group, case), case.config.batch_size
        steps = range(case.config.steps)
        curves.append([trainer.step(case.windows[i * batch : (i + 1) * batch], i).loss for i in steps])
    return curves


def plant(trainer: Trainer, fault: str) -> None:
    """Put one fault in, to show that the comparisons see it."""
    gradients = trainer.gradients
    if fault == "norms not summed":
        gradients._summed = [item for item in gradients._summed if "layernorm" not in item.key[0]]
    elif fault == "sharers not summed":
        gradients._summed = [item for item in gradients._summed if "_proj" not in item.key[0]]
    elif fault == "routers not summed":
        gradients._summed = [item for item in gradients._summed if "gate.weight" not in item.key[0]]
    elif fault == "copies counted":
        parts = [type(p)(p.piece, p.parameter, (trainer.group.rank,)) for p in trainer.parts]
        gradients._parts = parts
    elif fault == "no sum in front of a stage":
        trainer.executor._spread = lambda rows, tokens: rows  # type: ignore[method-assign]
    else:
        raise AssertionError(fault)
