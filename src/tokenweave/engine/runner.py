"""Runs steps on one rank: batch, stages, and what rank 0 needs of the logits."""

import numpy as np
import torch

from tokenweave.comm.collective import Collective
from tokenweave.config import partition
from tokenweave.engine.core import StepOutput
from tokenweave.engine.greedy import choose, pack
from tokenweave.engine.step import Step
from tokenweave.engine.tables import BlockTables
from tokenweave.execute import Executor
from tokenweave.execute.gpu_clock import GpuClock

SCORED_ROWS = 256  # rows whose logits are in memory at once when scoring: 256 x 49152 float32 are 50 MB


class RankRunner:
    """One rank's part of every step. All ranks run the same steps in the same order."""

    def __init__(self, executor: Executor, collective: Collective, tables: BlockTables) -> None:
        self.executor, self.model, self.collective, self.tables = executor, executor.model, collective, tables
        vocab, size = self.model.config.vocab_size, self.model.shard.size
        parts = [partition(vocab, size, rank) for rank in range(size)]
        self._widths = [part.stop - part.start for part in parts]

    @torch.inference_mode()
    def run(self, step: Step) -> StepOutput:
        """The step's results; on ranks other than 0 they are None."""
        normed = self.executor.forward(self.tables.batch(step), step.plan)
        logits, best = self._sampled(normed, step) if len(step.sampled) else (None, None)
        scores = self._score(normed, step) if len(step.scored) else None
        if isinstance(self.executor.clock, GpuClock):
            torch.cuda.current_stream().synchronize()
            self.collective.check()
        clock = self.executor.clock
        memory = 0 if self.executor.graphs is None else self.executor.graphs.pool_bytes
        return StepOutput(logits, best, scores, clock.compute, clock.communication, clock.hidden, memory)

    def _sampled(self, normed: torch.Tensor, step: Step) -> tuple[torch.Tensor | None, np.ndarray | None]:
        own = self.model.head(normed[self._index(step.sampled)])
        if not step.best_only:
            return self._gather(own, self._widths), None
        every = self._gather(pack(own, self.model.shard.vocab_rows.start), [2] * self.model.shard.size)
        return None, None if every is None else choose(every).numpy(force=True)

    def _gather(self, columns: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        """The ranks' columns side by side on rank 0, on the step's clock."""
        self.executor.clock.computed()
        every = self.collective.gather(columns, widths)
        self.executor.clock.communicated()
        return every

    def _index(self, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows.astype(np.int64)).to(self.model.device)

    def _score(self, normed: torch.Tensor, step: Step) -> np.ndarray | None:
        """Log-probabilities of the targets, from each rank's maximum, sum of exponentials and logit of the target where
        it has it: three numbers a row travel, not the logits (Megatron-LM, arXiv 1909.08053, section 3)."""
        parts = []
        for start in range(0, len(step.scored), SCORED_ROWS):
            stop = start + SCORED_ROWS
            logits = self.model.head(normed[self._index(step.scored[start:stop])]).float()
            own = self._index(step.targets[start:stop]) - self.model.shard.vocab_rows.start
            foreign = (own < 0) | (own >= logits.shape[1])
            target = logits.gather(1, own.masked_fill(foreign, 0).unsqueeze(1)).squeeze(1)
            peak = logits.amax(1)
            total = (logits - peak.unsqueeze(1)).exp().sum(1)
            mine = torch.stack((peak, total, target.masked_fill(foreign, -torch.inf)), 1)
            every = self._gather(mine, [3] * self.model.shard.size)
            if every is not None:
                peaks, sums, targets = every.view(len(every), -1, 3).unbind(2)
                highest = peaks.amax(1)
                total = (sums * (peaks - highest.unsqueeze(1)).exp()).sum(1)
                parts.append((targets.amax(1) - highest - total.log()).numpy(force=True))
        return np.concatenate(parts) if parts else None
