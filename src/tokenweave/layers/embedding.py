"""Vocabulary-parallel embedding and head (Megatron-LM, arXiv 1909.08053, section 3)."""

import torch
from torch import nn
from torch.nn import functional as F

from tokenweave.config import ModelConfig, Shard
from tokenweave.layers.batch import Batch
from tokenweave.layers.kernels.linear import project_rows
from tokenweave.layers.kernels.lookup import look_up_rows
from tokenweave.layers.kernels.views import View, empty
from tokenweave.layers.paths import kernel_multiplies, uses_gpu_kernels, uses_kernels
from tokenweave.layers.pieces import Piece, Pieces


class VocabParallelEmbedding(nn.Module):
    """Rows [vocab_rows] of the embedding table. weight: [own vocabulary rows, hidden]."""

    def __init__(self, config: ModelConfig, shard: Shard, *, dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__()
        self.rows = shard.vocab_rows
        self.full_shape = (config.vocab_size, config.hidden_size)
        shape = (self.rows.stop - self.rows.start, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        self._view = View()

    def forward(self, normed: torch.Tensor | None, batch: Batch, out: torch.Tensor | None) -> torch.Tensor:
        """This rank's rows of the lookup, zeros for ids that belong to another rank: [tokens, hidden].

        Raises ValueError if `out` is not of that shape: one row would otherwise be copied to all of them.
        """
        shape = (batch.num_tokens, self.weight.shape[1])
        if out is not None and out.shape != shape:
            raise ValueError(f"out must be {list(shape)}, got {list(out.shape)}")
        target = self.weight.new_empty(shape) if out is None else out
        if uses_kernels(self.weight, target):
            look_up_rows(batch.token_ids.numpy(), self.rows.start, self._view.of(self.weight), target.data_ptr())
            return target
        if uses_gpu_kernels(target):
            from tokenweave.layers import cuda

            return cuda.look_up(batch.token_ids, self.weight, self.rows.start, target)
        local = batch.token_ids - self.rows.start
        foreign = (local < 0) | (local >= self.weight.shape[0])
        found = F.embedding(local.masked_fill(foreign, 0), self.weight)
        found = found.masked_fill(foreign.unsqueeze(1), 0)
        return found if out is None else out.copy_(found)

    def pieces(self, name: str) -> Pieces:
        yield Piece(f"{name}.weight", self.full_shape, self.weight.data, 0, self.rows)


class VocabParallelHead(nn.Module):
    """Rows [vocab_rows] of the output projection; shares the embedding's weight where the model ties them."""

    def __init__(self, embedding: VocabParallelEmbedding, *, tied: bool) -> None:
        super().__init__()
        self.rows, self.full_shape, self.tied = embedding.rows, embedding.full_shape, tied
        own = embedding.weight
        self.weight = own if tied else nn.Parameter(torch.empty_like(own), requires_grad=False)
        self._view = View()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, hidden] normed rows to this rank's slice of the logits, [n, own vocabulary rows]."""
        if uses_kernels(self.weight, rows) and kernel_multiplies(len(rows), rows.dtype):
            logits = rows.new_empty(len(rows), len(self.weight))
            project_rows(rows.data_ptr(), logits.data_ptr(), len(rows), self._view.of(self.weight), empty(rows.dtype))
            return logits
        return F.linear(rows, self.weight)

    def pieces(self, name: str) -> Pieces:
        if not self.tied:
            yield Piece(f"{name}.weight", self.full_shape, self.weight.data, 0, self.rows)
