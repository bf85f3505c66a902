"""Tensor-parallel mixture of experts: a rank's own columns of every expert, and its partial sum of their results.

The router is whole on every rank and sees rows that are the same on every rank, so all ranks choose alike. What they
hold of each expert is a slice of its columns, as of an MLP: the result is a partial sum like any other.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from tokenweave.config import ModelConfig, Shard
from tokenweave.config import shard as one_shard
from tokenweave.layers.activation import activate
from tokenweave.layers.batch import Batch
from tokenweave.layers.kernels.linear import project_rows
from tokenweave.layers.kernels.mlp import mlp_rows
from tokenweave.layers.kernels.views import View, empty
from tokenweave.layers.padding import power_of_two
from tokenweave.layers.paths import kernel_multiplies, uses_kernels
from tokenweave.layers.pieces import Piece, Pieces

# Shapes: T tokens, E experts, k of them a token's, C this rank's columns of each.


class Experts(nn.Module):
    """sum over a token's k experts of probability * down(activation(gate(x)) * up(x)).

    router: [E, hidden]. gate_up: [E, 2 * C, hidden], gates, then ups. down: [E, hidden, C].
    """

    def __init__(self, config: ModelConfig, shard: Shard, *, dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__()
        assert config.experts is not None and config.gated_mlp
        self.config, self.experts, self.columns = config, config.experts, shard.expert_columns
        every = [one_shard(config, shard.size, rank).expert_columns for rank in range(shard.size)]
        self._every_ranks_columns = [columns.stop - columns.start for columns in every]
        own, count, hidden = self.columns.stop - self.columns.start, config.experts.count, config.hidden_size

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.router = weight(count, hidden)
        self.gate_up, self.down = weight(count, 2 * own, hidden), weight(count, hidden, own)
        self._views, self._no_bias = (View(), View(), View()), empty(dtype)

    def forward(self, normed: torch.Tensor, batch: Batch, out: torch.Tensor | None) -> torch.Tensor:
        """This rank's partial sum, [T, hidden], in `out` where given, which may be the memory of `normed`."""
        weights, chosen = self.route(normed)
        order = chosen.flatten().argsort(stable=True)  # (token, choice) pairs, expert by expert
        owners = chosen.flatten()[order]
        experts = torch.arange(self.experts.count, device=owners.device)
        ends = torch.searchsorted(owners, experts, right=True, out_int32=True)
        results = self._run(normed[order // self.experts.per_token], ends)
        # back in the order of tokens, so that a token's results add up in one order whatever the step's other tokens
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        parts = results[place].unflatten(0, (len(normed), self.experts.per_token))
        total = (parts.to(weights.dtype) * weights.unsqueeze(2)).sum(1).to(normed.dtype)
        return total if out is None else out.copy_(total)

    def route(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, float32, and indices of each token's experts: [T, k] both."""
        if uses_kernels(self.router, normed) and kernel_multiplies(len(normed), normed.dtype):
            # a row's bits do not depend on the other rows: a choice near a tie is the same in either lane
            logits = normed.new_empty(len(normed), self.experts.count)
            router = self._views[2].of(self.router)
            project_rows(normed.data_ptr(), logits.data_ptr(), len(normed), router, self._no_bias)
        else:
            logits = F.linear(normed, self.router)
        probabilities = logits.softmax(1, dtype=torch.promote_types(logits.dtype, torch.float32))
        weights, chosen = probabilities.topk(self.experts.per_token, dim=1)
        if self.experts.normalised:
            weights = weights / weights.sum(1, keepdim=True)
        return weights, chosen

    def _run(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Each row through its expert: rows [n, hidden], those of expert e before ends[e]."""
        if rows.is_cuda and self.capturable:
            wide = F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends)
            inner = activate(wide, self.config.activation, gated=True)
            return F.grouped_mm(inner, self.down.transpose(1, 2), offs=ends)
        stops = ends.tolist()
        gate_up, down = self._by_expert()
        pieces = [
            self._run_one(expert, gate_up[expert], down[expert], rows[start:stop])
            for expert, (start, stop) in enumerate(zip([0, *stops], stops, strict=False))
            if start < stop
        ]
        return torch.cat(pieces) if pieces else rows

    @property
    def capturable(self) -> bool:
        """Whether torch's grouped matmul takes these experts on a GPU, on every rank: the host need not know whose rows
        are whose. It wants rows of all operands to begin at multiples of 16 bytes.

        One answer for all ranks, since a step that is captured is padded, and ranks must come with as many rows.
        """
        widths = (self.config.hidden_size, *self._every_ranks_columns)
        return self.down.dtype == torch.bfloat16 and all(width % 8 == 0 for width in widths)

    def _by_expert(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | tuple[torch.Tensor, torch.Tensor]:
        """Both weights, to be indexed by expert. The gradient of an index is as large as all experts, for each of them
        once; that of unbind is so once. Without gradients its views of idle experts would only take time."""
        if torch.is_grad_enabled():
            return self.gate_up.unbind(), self.down.unbind()
        return self.gate_up, self.down

    def _run_one(self, expert: int, gate_up: torch.Tensor, down: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        kernels = self.config.activation == "silu" and uses_kernels(gate_up, rows)
        if kernels and kernel_multiplies(len(rows), rows.dtype):
            wide, narrow = self._views[0].of(self.gate_up)[expert], self._views[1].of(self.down)[expert]
            result = torch.empty_like(rows)
            weights = (wide, self._no_bias, narrow, self._no_bias)
            mlp_rows(rows.data_ptr(), result.data_ptr(), len(rows), weights)
            return result
        count = len(rows)
        if torch.is_grad_enabled() and rows.is_cpu and rows.dtype == torch.bfloat16:
            # oneDNN compiles for each number of rows, 2 MB with the gradients' products: in training every step
            # brings others, and a rank of a tiny model grew by 200 MB in 60 steps
            rows = F.pad(rows, (0, 0, 0, _coarse(count) - count))
        return F.linear(activate(F.linear(rows, gate_up), self.config.activation, gated=True), down)[:count]

    def pieces(self, name: str) -> Pieces:
        """Pieces of the checkpoint's tensors under `name`, e.g. "model.layers.0.mlp"."""
        wide, hidden, own = self.experts.intermediate_size, self.config.hidden_size, self.down.shape[2]
        yield Piece(f"{name}.gate.weight", tuple(self.router.shape), self.router.data)
        for expert in range(self.experts.count):
            gate, up = self.gate_up.data[expert].split(own)
            of = f"{name}.experts.{expert}"
            yield Piece(f"{of}.gate_proj.weight", (wide, hidden), gate, 0, self.columns)
            yield Piece(f"{of}.up_proj.weight", (wide, hidden), up, 0, self.columns)
            yield Piece(f"{of}.down_proj.weight", (hidden, wide), self.down.data[expert], 1, self.columns)


def _coarse(count: int) -> int:
    """The least of 16, 24, 32, 48, 64, 96, ... that is not below `count`."""
    power = max(power_of_two(count), 16)
    return power if count > power * 3 // 4 or power == 16 else power * 3 // 4
