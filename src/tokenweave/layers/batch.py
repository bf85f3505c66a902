"""One step's tokens and where their keys and values live."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from tokenweave.layers.cache import KVCache


@dataclass(frozen=True)
class Limits:
    """What kernels are launched for. context: the most keys of a request. single: every request has one new token."""

    context: int
    single: bool


@dataclass(frozen=True)
class Batch:
    """T new tokens of R requests, flattened in request order.

    token_ids, positions: int64 [T].
    query_offsets: int32 [R+1]; request i's new tokens are [query_offsets[i], query_offsets[i+1]).
    context_lengths: int32 [R]; keys that request i's last new token attends to: those already cached plus its new ones.
    slot_mapping: int64 [T], where each new token's key and value are written; block_tables: int32 [R, max blocks].
    cache: None runs without a cache: each request's new tokens attend to one another only, and context_lengths are the
    query lengths.
    prompt_lengths: int32 [R], where it matters (rope of kind "dynamic"): the whole prompt of each request, of which
    this batch may hold a part; None: prompts end where the contexts do.
    limits_given: of a step that is captured, whose lengths differ from replay to replay; None: those of the lengths.
    processors: how many of a GPU's processors a matmul, by its name, should count on; all where it is not named.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    query_offsets: torch.Tensor
    context_lengths: torch.Tensor
    slot_mapping: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    cache: KVCache | None = None
    prompt_lengths: torch.Tensor | None = None
    limits_given: Limits | None = None
    processors: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_requests(self) -> int:
        return self.context_lengths.shape[0]

    @cached_property
    def query_offsets_host(self) -> list[int]:
        return self.query_offsets.tolist()

    @cached_property
    def context_lengths_host(self) -> list[int]:
        return self.context_lengths.tolist()

    @cached_property
    def limits(self) -> Limits:
        if self.limits_given is not None:
            return self.limits_given
        offsets, contexts = self.query_offsets_host, self.context_lengths_host
        counts = [b - a for a, b in zip(offsets, offsets[1:], strict=False)]
        single = bool(counts) and min(counts) == max(counts) == 1
        return Limits(max(contexts, default=0), single)

    @property
    def max_context_length(self) -> int:
        return self.limits.context

    @cached_property
    def owners(self) -> torch.Tensor:
        """int64 [T], the request of each new token. Computed where the batch is, so that a captured step computes it at
        each replay."""
        token = torch.arange(self.num_tokens, dtype=torch.int32, device=self.query_offsets.device)
        return torch.searchsorted(self.query_offsets[1:].contiguous(), token, right=True)

    @cached_property
    def total_lengths(self) -> torch.Tensor:
        """int64 [T], of each new token's request: its whole prompt or, where that is more, up to the token itself."""
        prompts = self.context_lengths if self.prompt_lengths is None else self.prompt_lengths
        return torch.maximum(prompts[self.owners], self.positions + 1)

    @cached_property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """positions, query_offsets, context_lengths, slot_mapping and block_tables as the CPU kernels take them."""
        assert self.slot_mapping is not None and self.block_tables is not None
        wide = [np.ascontiguousarray(t.numpy(), np.int64) for t in (self.positions, self.slot_mapping)]
        offsets, contexts, tables = (
            np.ascontiguousarray(t.numpy(), np.int32)
            for t in (self.query_offsets, self.context_lengths, self.block_tables)
        )
        return wide[0], offsets, contexts, wide[1], tables

    @staticmethod
    def prompts(prompts: list[list[int]], device: str = "cpu") -> "Batch":
        """A cacheless batch of whole prompts: for scoring, training and tests."""
        lengths = torch.tensor([len(p) for p in prompts], dtype=torch.int32)
        offsets = torch.zeros(len(prompts) + 1, dtype=torch.int32)
        offsets[1:] = lengths.cumsum(0)
        return Batch(
            token_ids=torch.tensor([t for p in prompts for t in p], dtype=torch.int64, device=device),
            positions=torch.tensor([i for p in prompts for i in range(len(p))], dtype=torch.int64, device=device),
            query_offsets=offsets.to(device),
            context_lengths=lengths.to(device),
        )

    def split(self, cut: int) -> tuple["Batch", "Batch"]:
        """Two batches: tokens [0, cut) and [cut, T). A request may be cut in two: its second part then has the first
        part's tokens in its context, so with a cache the first half's layer must run before the second half's.

        Raises ValueError if cut is outside [0, T], or if it falls inside a request of a batch without a cache.
        """
        total = self.num_tokens
        if not 0 <= cut <= total:
            raise ValueError(f"cut must be in [0, {total}], got {cut}")
        offsets, contexts = self.query_offsets_host, self.context_lengths_host
        first = [i for i in range(self.num_requests) if offsets[i] < cut]
        second = [i for i in range(self.num_requests) if offsets[i + 1] > cut]
        shared = bool(first) and bool(second) and first[-1] == second[0]
        if shared and self.cache is None:
            raise ValueError(f"cut {cut} falls inside request {first[-1]}, and without a cache it would lose its past")
        first_contexts = [contexts[i] for i in first]
        if shared:
            first_contexts[-1] -= offsets[first[-1] + 1] - cut
        prompts = self.context_lengths if shared and self.prompt_lengths is None else self.prompt_lengths
        halves = (
            (slice(0, cut), first, [offsets[i] for i in first] + [cut], first_contexts),
            (slice(cut, total), second, [max(offsets[i], cut) - cut for i in second] + [total - cut],
             [contexts[i] for i in second]),
        )  # fmt: skip
        return tuple(self._part(*half, prompts) for half in halves)  # type: ignore[return-value]

    def _part(
        self, tokens: slice, requests: list[int], offsets: list[int], contexts: list[int], prompts: torch.Tensor | None
    ) -> "Batch":
        device = self.token_ids.device
        rows = slice(requests[0], requests[-1] + 1) if requests else slice(0, 0)
        return Batch(
            token_ids=self.token_ids[tokens],
            positions=self.positions[tokens],
            query_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
            context_lengths=torch.tensor(contexts, dtype=torch.int32, device=device),
            slot_mapping=None if self.slot_mapping is None else self.slot_mapping[tokens],
            block_tables=None if self.block_tables is None else self.block_tables[rows],
            cache=self.cache,
            prompt_lengths=None if prompts is None else prompts[rows],
        )
