"""What the ranks of the checkpoint tests run."""

import errno
import os
from pathlib import Path
from typing import Any

import torch
from train.train_ranks import Case, make_trainer

from tokenweave.comm import Group
from tokenweave.train.checkpoint import restore, save
from tokenweave.train.run import latest, read_state


def train_and_save(group: Group, case: Case, directory: Path, steps: range, fault: str = "") -> list[float]:
    """The losses of `steps`, from the last checkpoint if there is one, with a checkpoint behind each."""
    trainer, batch, losses = make_trainer(group, case), case.config.batch_size, []
    if (found := latest(directory)) is not None:
        restore(trainer, found)
        assert read_state(found)["step"] == steps.start
    for step in steps:
        losses.append(trainer.step(case.windows[step * batch : (step + 1) * batch], step).loss)
        if fault == "full disk" and step == steps.stop - 1:
            os.posix_fallocate = _full  # type: ignore[assignment]
        if fault == "not finite" and step == steps.stop - 1 and group.rank == group.size - 1:
            trainer.optimizer.second[-1].view(-1)[-1] = torch.inf
        if fault == "half written" and step == steps.stop - 1:
            (directory / ".unfinished-step-00000099" / "weights").mkdir(parents=True, exist_ok=True)
            return losses
        save(trainer, directory, step + 1, {"step": step + 1})
    return losses


def _full(fd: int, offset: int, length: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def states(group: Group, case: Case, directory: Path) -> dict[str, Any]:
    """This rank's parts of all three states after restoring, by state, name and part."""
    trainer = make_trainer(group, case)
    found = latest(directory)
    assert found is not None
    restore(trainer, found)
    optimizer = trainer.optimizer
    index = {id(p): i for i, p in enumerate(optimizer.parameters)}
    for master, parameter in zip(optimizer.masters, optimizer.parameters, strict=True):
        assert torch.equal(master.to(parameter.dtype), parameter.data)
    return {
        f"{state} {part.name} {part.piece.part}": part.of(tensors[index[id(part.parameter)]]).clone()
        for state, tensors in (
            ("weights", optimizer.masters), ("first_moment", optimizer.first), ("second_moment", optimizer.second)
        )
        for part in trainer.parts
    }  # fmt: skip
