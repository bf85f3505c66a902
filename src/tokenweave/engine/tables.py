"""Every rank's copy of the running requests' block tables, and the batch that a step becomes with it."""

import numpy as np
import torch

from tokenweave.engine.step import Step
from tokenweave.layers.batch import Batch
from tokenweave.layers.cache import KVCache


class BlockTables:
    """Row i: the blocks of the request in slot i, in order. Steps carry only what changed, so a step of decodes costs
    a few vector operations on any rank, however long the contexts.

    tells_prompts: batches have prompt_lengths.
    """

    def __init__(self, *, slots: int, max_context: int, cache: KVCache, tells_prompts: bool = False) -> None:
        self.cache, self.tells_prompts = cache, tells_prompts
        self._prompts = np.zeros(slots, dtype=np.int32)
        self._rows = np.zeros((slots, -(-max_context // cache.block_size)), dtype=np.int32)

    def batch(self, step: Step) -> Batch:
        """The step's batch, on the CPU, after taking over its new table entries."""
        self._rows[step.table_slots, step.table_indexes] = step.table_blocks
        self._prompts[step.admitted] = step.prompt_lengths
        size = self.cache.block_size
        ends = np.cumsum(step.counts)
        offsets = np.concatenate(([0], ends)).astype(np.int32)
        contexts = step.starts + step.counts
        rows = self._rows[step.slots, : -(-int(contexts.max()) // size)]
        if len(step.token_ids) == len(step.slots):  # decodes only
            owner, positions = np.arange(len(rows)), step.starts.astype(np.int64)
        else:
            owner = np.repeat(np.arange(len(rows)), step.counts)
            positions = np.arange(len(owner)) + (step.starts - offsets[:-1])[owner]
        slot_mapping = rows[owner, positions // size].astype(np.int64) * size + positions % size
        return Batch(
            token_ids=torch.from_numpy(step.token_ids.astype(np.int64)),
            positions=torch.from_numpy(positions),
            query_offsets=torch.from_numpy(offsets),
            context_lengths=torch.from_numpy(contexts),
            slot_mapping=torch.from_numpy(slot_mapping),
            block_tables=torch.from_numpy(rows),
            cache=self.cache,
            prompt_lengths=torch.from_numpy(self._prompts[step.slots]) if self.tells_prompts else None,
        )
