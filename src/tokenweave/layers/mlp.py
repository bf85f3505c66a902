"""Tensor-parallel MLP: a rank's own columns, and its partial sum of the down projection."""

import torch
from torch import nn

from tokenweave.config import ModelConfig, Shard
from tokenweave.layers.activation import activate
from tokenweave.layers.batch import Batch
from tokenweave.layers.kernels.mlp import gate_rows, mlp_rows
from tokenweave.layers.paths import kernel_multiplies
from tokenweave.layers.pieces import Piece, Pieces
from tokenweave.layers.projection import Projection


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x)) or, ungated, down(activation(up(x))).

    gate_up: [2 * own columns, hidden], all gates, then all ups; ungated [own columns, hidden]. down: [hidden, own
    columns], bias on rank 0 only.
    """

    def __init__(self, config: ModelConfig, shard: Shard, *, dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__()
        self.config, self.columns = config, shard.mlp_columns
        own = self.columns.stop - self.columns.start
        self.labels = ("gate_proj", "up_proj") if config.gated_mlp else ("up_proj",)
        wide = len(self.labels) * own
        self.gate_up = Projection(config.hidden_size, wide, bias=config.mlp_bias, dtype=dtype, device=device)
        self.down = Projection(
            own, config.hidden_size, bias=config.mlp_bias and shard.rank == 0, dtype=dtype, device=device
        )
        self._has_kernels = config.gated_mlp and config.activation == "silu"
        self._projections = self.gate_up, self.down  # a module's own attributes take 0.5 µs each, those of a tuple 0.05

    def forward(self, normed: torch.Tensor, batch: Batch, out: torch.Tensor | None) -> torch.Tensor:
        """This rank's partial sum, [tokens, hidden], in `out` where given, which may be the memory of `normed`."""
        if self._has_kernels and self._projections[0].fits_kernels(normed, out):
            return self._forward_kernels(normed, torch.empty_like(normed) if out is None else out)
        wide = self.gate_up(normed, None, batch.processors.get("gate_up", 0))
        inner = activate(wide, self.config.activation, gated=self.config.gated_mlp)
        return self.down(inner, out, batch.processors.get("down", 0))

    def _forward_kernels(self, normed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        tokens = len(normed)
        if kernel_multiplies(tokens, normed.dtype):
            gate_up, down = self._projections
            mlp_rows(normed.data_ptr(), out.data_ptr(), tokens, (*gate_up.arrays(), *down.arrays()))
            return out
        wide = self.gate_up(normed)
        gated = wide.new_empty(tokens, wide.shape[1] // 2)
        gate_rows(wide.data_ptr(), gated.data_ptr(), tokens, gated.shape[1], self.down.arrays()[0])
        return self.down(gated, out)

    def pieces(self, name: str) -> Pieces:
        """Pieces of the checkpoint's tensors under `name`, e.g. "model.layers.0.mlp"."""
        wide, hidden = self.config.intermediate_size, self.config.hidden_size
        own = self.columns.stop - self.columns.start
        for index, label in enumerate(self.labels):
            target = slice(index * own, (index + 1) * own)
            yield Piece(f"{name}.{label}.weight", (wide, hidden), self.gate_up.weight.data[target], 0, self.columns)
            if self.gate_up.bias is not None:
                yield Piece(f"{name}.{label}.bias", (wide,), self.gate_up.bias.data[target], 0, self.columns)
        yield Piece(f"{name}.down_proj.weight", (hidden, wide), self.down.weight.data, 1, self.columns)
        if self.down.bias is not None:
            yield Piece(f"{name}.down_proj.bias", (hidden,), self.down.bias.data)
