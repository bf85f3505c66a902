"""tokenweave bench layer --tp N: one layer of a large model on N GPUs, its weights drawn at random; see `bench.layer`.

serial and reordered go through NCCL, the rest through the fused operation. All ranks try the same plans: what they
measured is brought together after every trial.
"""

import argparse
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tokenweave.bench.dimensions import model_directory
from tokenweave.bench.nccl import NcclOperations
from tokenweave.comm import Group, launch
from tokenweave.execute.gpu_trials import GpuTrialRunner, Sustained
from tokenweave.plan.trial import Trial, TrialResult


class SharedTrials:
    """Trials on this rank and its peers, at the same time. The slowest rank counts, on every rank."""

    def __init__(self, runner: GpuTrialRunner) -> None:
        self.runner = runner

    def run(self, trial: Trial) -> TrialResult:
        assert not trial.parts
        times = self.runner.run(trial)
        steps = torch.from_numpy(np.ascontiguousarray(times.steps))
        dist.all_reduce(steps, dist.ReduceOp.MAX)
        times.steps[...] = steps.numpy()
        return TrialResult([times])

    def sustained(self, trial: Trial) -> Sustained:
        """On the slowest rank; clock and power are this rank's."""
        found = self.runner.sustained(trial)
        seconds = torch.tensor([found.seconds])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return replace(found, seconds=seconds.item())


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What `bench layer` prints, measured on rank 0 and the others."""
    return launch(_measure, args.tp, "symmetric", device="cuda", args=(args,))[0]


def _measure(group: Group, args: argparse.Namespace) -> list[dict[str, Any]]:
    from tokenweave.bench.layer import MANY, measured_sizes
    from tokenweave.models.random_weights import random_model

    directory, most = model_directory(args.model, layers=MANY), max(args.tokens)
    model = random_model(directory, rank=group.rank, size=group.size, dtype=torch.bfloat16, device=str(group.device))
    with (
        group.open_collective(model.config.hidden_size, most, torch.bfloat16, 2) as collective,
        closing(
            GpuTrialRunner(model, NcclOperations(collective, group.device), max_tokens=most, cache_tokens=2 * most)
        ) as runner,
    ):
        return measured_sizes(SharedTrials(runner), args, group.rank == 0)
