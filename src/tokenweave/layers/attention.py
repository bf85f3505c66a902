"""Tensor-parallel self-attention: a rank's own heads, and its partial sum of the output projection."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tokenweave.config import ModelConfig, Shard
from tokenweave.layers.batch import Batch
from tokenweave.layers.kernels.attention import WHOLE_CONTEXT, attend_rows, attention_rows
from tokenweave.layers.kernels.views import View, empty
from tokenweave.layers.norm import RMSNorm
from tokenweave.layers.paths import fits_gpu_pages, kernel_multiplies, uses_gpu_kernels
from tokenweave.layers.pieces import Piece, Pieces
from tokenweave.layers.projection import Projection
from tokenweave.layers.rotary import Rope

# Shapes: T tokens of the step, Q this rank's query heads, K its key/value heads, D head_dim, S keys of one request.


class Attention(nn.Module):
    """Grouped-query attention with rotary positions over the paged cache (or without one).

    qkv: [(Q + 2K) * D, hidden], query, key and value heads in that order. output: [hidden, Q * D], bias on rank 0 only.
    """

    def __init__(
        self, config: ModelConfig, shard: Shard, layer: int, rope: Rope, *, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        super().__init__()
        self.config, self.shard, self.layer, self.rope = config, shard, layer, rope
        self.window = config.window(layer)
        self.query_size = shard.num_query_heads * config.head_dim
        self.kv_size = shard.num_kv_heads * config.head_dim
        self.qkv = Projection(
            config.hidden_size, self.query_size + 2 * self.kv_size, bias=config.qkv_bias, dtype=dtype, device=device
        )
        self.output = Projection(
            self.query_size, config.hidden_size, bias=config.output_bias and shard.rank == 0, dtype=dtype, device=device
        )
        self.query_norm = self.key_norm = None
        if config.qk_norm:
            self.query_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
            self.key_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
        # a module's own attributes take 0.5 µs each, those of a tuple 0.05
        self._projections, self._norms = (self.qkv, self.output), (self.query_norm, self.key_norm)
        self._norm_views, self._no_norm = (View(), View()), empty(dtype)

    def forward(self, normed: torch.Tensor, batch: Batch, out: torch.Tensor | None) -> torch.Tensor:
        """This rank's partial sum, [T, hidden], in `out` where given, which may be the memory of `normed`."""
        self.rope.reserve(batch)
        cached = batch.cache is not None and batch.cache.keys.dtype == normed.dtype
        if cached and self._projections[0].fits_kernels(normed, out):
            return self._forward_kernels(normed, batch, torch.empty_like(normed) if out is None else out)
        qkv = self.qkv(normed, None, batch.processors.get("qkv", 0))
        attended = self._attend_gpu(qkv, batch) if cached and self._suits_gpu(qkv, batch) else self._attend(qkv, batch)
        return self.output(attended, out, batch.processors.get("output", 0))

    @property
    def capturable(self) -> bool:
        """Whether the attention kernel takes these heads on a GPU; else the host goes by request."""
        size = self.config.head_dim
        return self.qkv.weight.dtype != torch.float32 and size % 8 == 0 and size <= 256

    def _suits_gpu(self, qkv: torch.Tensor, batch: Batch) -> bool:
        assert batch.cache is not None
        return uses_gpu_kernels(qkv) and self.capturable and fits_gpu_pages(batch.cache.block_size)

    def _attend_gpu(self, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
        from tokenweave.layers import cuda, cuda_attention

        query_norm, key_norm = self._norms
        norm = None
        if query_norm is not None and key_norm is not None:
            norm = cuda.HeadNorm(query_norm.weight, key_norm.weight, query_norm.eps)
        return cuda_attention.attend(
            qkv,
            batch,
            self.layer,
            query_size=self.query_size,
            rotation=self.rope.rotation(batch),
            norm=norm,
            window=self.window,
        )

    def _forward_kernels(self, normed: torch.Tensor, batch: Batch, out: torch.Tensor) -> torch.Tensor:
        assert batch.cache is not None
        tokens, rotation, cache, step = len(normed), self.rope.arrays, batch.cache.arrays[self.layer], batch.arrays
        if self.rope.dynamic:
            turns = self.rope.rotation(batch)
            rotation, step = (turns.cos.numpy(), turns.sin.numpy()), (turns.rows.numpy(), *step[1:])
        window = WHOLE_CONTEXT if self.window is None else self.window
        if kernel_multiplies(tokens, normed.dtype):
            qkv_projection, output_projection = self._projections
            weights = (*qkv_projection.arrays(), *output_projection.arrays(), *self._norm_arrays())
            attention_rows(normed.data_ptr(), out.data_ptr(), tokens, weights, rotation, cache, step, window)
            return out
        qkv = self.qkv(normed)
        attended = normed.new_empty(tokens, self.query_size)
        attend_rows(qkv.data_ptr(), attended.data_ptr(), tokens, self.shard.num_query_heads,
                    self._norm_arrays(), rotation, cache, step, window)  # fmt: skip
        return self.output(attended, out)

    def _norm_arrays(self) -> tuple[np.ndarray, np.ndarray, float]:
        query_norm, key_norm = self._norms
        if query_norm is None or key_norm is None:
            return self._no_norm, self._no_norm, self.config.rms_norm_eps
        query_view, key_view = self._norm_views
        return query_view.of(query_norm.weight), key_view.of(key_norm.weight), query_norm.eps

    def _attend(self, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Projected heads [T, (Q + 2K) * D] to attended values [T, Q * D]."""
        queries, keys, values = (
            heads.unflatten(1, (-1, self.config.head_dim))
            for heads in qkv.split((self.query_size, self.kv_size, self.kv_size), dim=1)
        )
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        rotation = self.rope.rotation(batch)
        queries, keys = rotation.turn(queries), rotation.turn(keys)
        if batch.cache is not None:
            batch.cache.keys[self.layer].flatten(0, 1)[batch.slot_mapping] = keys
            batch.cache.values[self.layer].flatten(0, 1)[batch.slot_mapping] = values
        attended = []
        offsets = batch.query_offsets_host
        for request, (start, stop) in enumerate(zip(offsets, offsets[1:], strict=False)):
            if batch.cache is None:
                past_keys, past_values = keys[start:stop], values[start:stop]
            else:
                past_keys, past_values = self._cached(batch, request)
            attended.append(causal_attention(queries[start:stop], past_keys, past_values, self.window))
        return torch.cat(attended).flatten(1) if attended else qkv[:, : self.query_size]

    def _cached(self, batch: Batch, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of one request, [S, K, D] each, gathered from its blocks."""
        assert batch.cache is not None and batch.block_tables is not None
        length = batch.context_lengths_host[request]
        blocks = batch.block_tables[request, : -(-length // batch.cache.block_size)].long()
        keys = batch.cache.keys[self.layer][blocks].flatten(0, 1)[:length]
        values = batch.cache.values[self.layer][blocks].flatten(0, 1)[:length]
        return keys, values

    def pieces(self, name: str) -> Pieces:
        """Pieces of the checkpoint's tensors under `name`, e.g. "model.layers.0.self_attn"."""
        config, size, hidden = self.config, self.config.head_dim, self.config.hidden_size
        own_queries, own_kv = _scaled(self.shard.query_heads, size), _scaled(self.shard.kv_heads, size)
        start = 0
        for label, heads, own in (
            ("q_proj", config.num_attention_heads, own_queries),
            ("k_proj", config.num_key_value_heads, own_kv),
            ("v_proj", config.num_key_value_heads, own_kv),
        ):
            target = slice(start, start + own.stop - own.start)
            start = target.stop
            yield Piece(f"{name}.{label}.weight", (heads * size, hidden), self.qkv.weight.data[target], 0, own)
            if self.qkv.bias is not None:
                yield Piece(f"{name}.{label}.bias", (heads * size,), self.qkv.bias.data[target], 0, own)
        shape = (hidden, config.num_attention_heads * size)
        yield Piece(f"{name}.o_proj.weight", shape, self.output.weight.data, 1, own_queries)
        if self.output.bias is not None:
            yield Piece(f"{name}.o_proj.bias", (hidden,), self.output.bias.data)
        if self.query_norm is not None and self.key_norm is not None:
            yield from self.query_norm.pieces(f"{name}.q_norm")
            yield from self.key_norm.pieces(f"{name}.k_norm")


def causal_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """softmax(q k' / sqrt(D)) v of one request: queries [T, Q, D] are the last T of the S keys [S, K, D]; [T, Q, D].

    window: a query attends to so many keys, the last of them its own; None: to all up to its own.
    """
    new, total = queries.shape[0], keys.shape[0]
    mask = None
    if window is not None and window < total:
        # the first query's first key: those before it no query sees
        first = max(total - new - window + 1, 0)
        keys, values, total = keys[first:], values[first:], total - first
        mask = torch.ones(new, total, dtype=torch.bool, device=queries.device)
        mask = mask.tril(total - new).triu(total - new - window + 1)
    elif 1 < new < total:  # torch's own causal mask aligns the first query with the first key
        mask = torch.ones(new, total, dtype=torch.bool, device=queries.device).tril(total - new)
    attended = F.scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None and new == total,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return attended.squeeze(0).transpose(0, 1)


def _scaled(heads: slice, size: int) -> slice:
    return slice(heads.start * size, heads.stop * size)
