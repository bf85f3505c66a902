"""What each rank of `tokenweave train` runs: start or resume, the steps, checkpoints, the finished model."""

import math
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tokenweave.comm.group import Group
from tokenweave.comm.links import Links
from tokenweave.config import shard
from tokenweave.config.foreign import read_config
from tokenweave.models.checkpoint import SINGLE, Checkpoint, load
from tokenweave.models.decoder import Decoder
from tokenweave.train.checkpoint import restore, save, write_whole
from tokenweave.train.config import TrainingConfig
from tokenweave.train.initialize import initialize
from tokenweave.train.memory import MeasuredMemory, MemoryMeter, warm_up
from tokenweave.train.run import CHECKPOINTS, MODEL, TOKENS, Diverged, Finished, Progress, Run, latest, read_state
from tokenweave.train.tokens import TokenFile
from tokenweave.train.trainer import Trainer
from tokenweave.train.windows import InOrder, Windows


def main(group: Group, links: Links, run: Run, config: TrainingConfig) -> MeasuredMemory:
    """Rank 0 sends a `Progress` for each step and `Finished` at the end."""
    dtype = getattr(torch, config.dtype)
    warm_up(group, config)
    meter = MemoryMeter(group.device)
    trainer, rows = _begin(group, run, config, dtype)
    train, held_out = _texts(run, config)
    windows, checked = Windows(train, config.length, config.seed), InOrder(held_out, config.length)
    start = len(rows)
    with trainer:
        for step in range(start, config.steps):
            began = time.perf_counter()
            result = trainer.step(windows.rows(step * config.batch_size, config.batch_size), step)
            seconds = time.perf_counter() - began
            done = step + 1
            score = _score(trainer, checked, done) if run.evaluates(done, config.steps) else None
            progress = Progress(done, result.loss, result.norm, result.learning_rate, seconds, score)
            rows.append(asdict(progress))
            if group.rank == 0:
                links.parent.send(progress)
            if run.checkpoints(done, config.steps):
                save(trainer, run.out / CHECKPOINTS, done, {"rows": rows})
        measured = meter.measure(trainer)
        score = _score(trainer, checked, start) if start == config.steps else None
        _publish(trainer, run.out / MODEL)
    if group.rank == 0:
        links.parent.send(Finished(score))
    return measured


def _score(trainer: Trainer, held_out: InOrder, done: int) -> float:
    """The loss on the held-out text after `done` steps. Raises Diverged if it is not finite."""
    loss = trainer.evaluate(held_out)
    if not math.isfinite(loss):
        raise Diverged(f"after step {done} the loss on the held-out text is {loss}")
    return loss


def _begin(group: Group, run: Run, config: TrainingConfig, dtype: torch.dtype) -> tuple[Trainer, list[dict[str, Any]]]:
    """The trainer, and the rows of the steps that it has done."""
    described = read_config(run.out / MODEL)
    model = Decoder(described, shard(described, group.size, group.rank), dtype=dtype, device=str(group.device))
    found = latest(run.out / CHECKPOINTS)
    if found is None and run.model is not None:
        load(model.pieces(), Checkpoint(run.model), rank=group.rank)
    trainer = Trainer(group, model, config)
    if found is not None:
        restore(trainer, found)
        return trainer, read_state(found)["rows"]
    if run.model is None:
        initialize(trainer.parts, model, config.seed)
        trainer.optimizer.adopt()
    return trainer, []


def _texts(run: Run, config: TrainingConfig) -> tuple[TokenFile, TokenFile]:
    """Tokens to train on, and the last ones, which are held out."""
    count = len(TokenFile(run.out / TOKENS))
    border = count - max(2 * config.length, int(count * run.held_out))
    return TokenFile(run.out / TOKENS, 0, max(0, border)), TokenFile(run.out / TOKENS, border)


def _publish(trainer: Trainer, directory: Path) -> None:
    """The weights in the type they were trained in, beside config.json and the tokenizer."""
    unfinished = directory / ".unfinished"
    write_whole(unfinished, trainer, trainer.optimizer.masters, trainer.model.dtype)
    if trainer.group.rank == 0:
        os.replace(unfinished / SINGLE, directory / SINGLE)
        unfinished.rmdir()
    trainer.sums.barrier()
