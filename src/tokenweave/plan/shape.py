"""What a step computes, as far as its cost depends on it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Load:
    """The work of one lane.

    tokens: new tokens. pairs: query-key pairs that attention computes (causal). keys: keys and values it reads.
    rows: tokens whose logits are wanted.
    """

    tokens: int
    pairs: int = 0
    keys: int = 0
    rows: int = 0


class StepShape:
    """Requests of a step: `counts[i]` new tokens each, the last of which attends to `contexts[i]` keys.

    A context counts the new tokens too, as in `Batch.context_lengths`. Raises ValueError on a negative count or a
    context shorter than its count.
    """

    def __init__(self, counts: Sequence[int] | np.ndarray, contexts: Sequence[int] | np.ndarray) -> None:
        self.counts, self.contexts = np.asarray(counts, dtype=np.int64), np.asarray(contexts, dtype=np.int64)
        if self.counts.ndim != 1 or self.counts.shape != self.contexts.shape:
            raise ValueError(f"counts and contexts must be two lists of one length, got {counts} and {contexts}")
        if (self.counts < 0).any() or (self.contexts < self.counts).any():
            raise ValueError(f"counts must be >= 0 and contexts >= counts, got {counts} and {contexts}")
        self.ends = np.cumsum(self.counts)
        self._pairs = np.cumsum(_pairs(self.counts, self.contexts))
        self._keys = np.cumsum(self.contexts * (self.counts > 0))
        self._rows = np.cumsum(self.counts > 0)

    @classmethod
    def prefill(cls, tokens: int, cached: int = 0) -> "StepShape":
        """One request of `tokens` new tokens after `cached` earlier ones; no request at all for 0 tokens."""
        return cls([tokens], [tokens + cached]) if tokens else cls([], [])

    @classmethod
    def prompts(cls, tokens: int, longest: int) -> "StepShape":
        """`tokens` new tokens of as few whole prompts as can be, none over `longest`."""
        requests = -(-tokens // longest)
        ends = [tokens * (i + 1) // requests for i in range(requests)]
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return cls(counts, counts)

    @classmethod
    def decode(cls, requests: int, context: int) -> "StepShape":
        """One new token for each of `requests`, attending to `context` keys, itself among them."""
        return cls([1] * requests, [context] * requests)

    @property
    def tokens(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def load(self) -> Load:
        """The whole step as one lane."""
        return self._first(len(self.counts))

    def loads(self, cut: int) -> tuple[Load, Load]:
        """The two lanes of tokens [0, cut) and [cut, T). A request that is cut in two has the first part's keys in
        the context of its second part: no pair is lost or computed twice, but its keys are read by both.

        Raises ValueError if cut is outside [0, T].
        """
        if not 0 <= cut <= self.tokens:
            raise ValueError(f"cut must be in [0, {self.tokens}], got {cut}")
        whole = self.load()
        if cut in (0, self.tokens):
            return (Load(0), whole) if cut == 0 else (whole, Load(0))
        split = int(np.searchsorted(self.ends, cut, side="left"))  # the request that holds token cut - 1
        before = int(self.ends[split] - self.counts[split])
        first_count, count, context = cut - before, int(self.counts[split]), int(self.contexts[split])
        first_context = context - (count - first_count)
        done = self._first(split)
        inside = first_count < count
        pairs = done.pairs + int(_pairs(first_count, first_context))
        first = Load(cut, pairs, done.keys + first_context, done.rows + (not inside))
        keys = whole.keys - done.keys - (0 if inside else context)
        return first, Load(self.tokens - cut, whole.pairs - pairs, keys, whole.rows - first.rows)

    def _first(self, requests: int) -> Load:
        """The first so many requests as one lane."""
        if not requests:
            return Load(0)
        last = requests - 1
        return Load(int(self.ends[last]), int(self._pairs[last]), int(self._keys[last]), int(self._rows[last]))

    def borders(self) -> list[int]:
        """Cuts that fall between two requests."""
        return [int(end) for end in np.unique(self.ends) if 0 < end < self.tokens]


def _pairs(count: int | np.ndarray, context: int | np.ndarray) -> int | np.ndarray:
    """Query-key pairs of `count` last tokens of `context`, each attending to itself and everything before it."""
    return count * context - count * (count - 1) // 2
