"""From logits to token ids, all rows of a step at once."""

from dataclasses import dataclass

import numpy as np
import torch

from tokenweave.engine.draw import NUMBERS, draw
from tokenweave.engine.events import NO_TOKEN
from tokenweave.engine.greedy import largest
from tokenweave.engine.params import SamplingParams

# Shapes: S rows of logits, V vocabulary.
ROWS = 8  # in work at a time: of 49152 float32 each they stay in the cache; 64 at a time take 4 times as long


@dataclass(frozen=True)
class Sampled:
    """token_ids: int32 [S]. logprobs: {token id: log-probability}, the chosen first, by row, for those that asked."""

    token_ids: np.ndarray
    logprobs: dict[int, dict[int, float]]


class Sampler:
    """Sampling parameters by slot, in arrays.

    A row's random number depends on its request's seed and on how many tokens the request has, and on nothing else, so
    neither the rest of the batch nor a preemption changes the answer.
    """

    def __init__(self, slots: int) -> None:
        self._temperature = np.zeros(slots, dtype=np.float32)
        self._top_p = np.ones(slots, dtype=np.float64)
        self._top_k = np.zeros(slots, dtype=np.int64)
        self._seed = np.zeros(slots, dtype=np.uint64)
        self._logprobs = np.full(slots, -1, dtype=np.int64)

    def assign(self, slot: int, params: SamplingParams, seed: int) -> None:
        """The slot's rows follow `params` from now on."""
        self._temperature[slot] = 0 if params.greedy else params.temperature
        self._top_p[slot] = params.top_p
        self._top_k[slot] = max(params.top_k, 0)
        self._seed[slot] = seed
        self._logprobs[slot] = -1 if params.logprobs is None else params.logprobs

    def greedy(self, slots: np.ndarray) -> bool:
        """Whether the most likely token is all that is wanted of every one of these."""
        return not (self._temperature[slots] > 0).any() and not (self._logprobs[slots] >= 0).any()

    def sample(self, logits: torch.Tensor, slots: np.ndarray, indexes: np.ndarray) -> Sampled:
        """One token for each row, NO_TOKEN where its largest logit is not finite.

        logits: [S, V]. slots: [S], whose row it is. indexes: [S], which of its tokens."""
        random = np.flatnonzero(self._temperature[slots] > 0)
        if len(random) == len(slots):
            token_ids = np.empty(len(slots), dtype=np.int32)
        else:
            values, columns = largest(logits)
            token_ids = torch.where(values.isfinite(), columns, NO_TOKEN).numpy(force=True).astype(np.int32)
        for start in range(0, len(random), ROWS):
            rows = random[start : start + ROWS]
            chosen = logits[torch.from_numpy(rows).to(logits.device)].float()
            uniform = _uniform(self._seed[slots[rows]], indexes[rows])
            drawn = self._draw(chosen, slots[rows], uniform)
            token_ids[rows] = torch.where(chosen.amax(-1).isfinite(), drawn, NO_TOKEN).numpy(force=True)
        return Sampled(token_ids, self._report(logits, slots, token_ids))

    def _draw(self, logits: torch.Tensor, slots: np.ndarray, uniform: np.ndarray) -> torch.Tensor:
        temperature, top_p, top_k, numbers = (
            torch.from_numpy(values).to(logits.device)
            for values in (self._temperature[slots], self._top_p[slots], self._top_k[slots], uniform)
        )
        # the maximum is taken out before dividing: at temperatures near zero the quotient overflows
        scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.unsqueeze(1)
        return draw(scaled, numbers, top_k, top_p)

    def _report(self, logits: torch.Tensor, slots: np.ndarray, token_ids: np.ndarray) -> dict[int, dict[int, float]]:
        """Log-probabilities under the model's own distribution: before temperature, top-k and top-p, as in vLLM."""
        report = {}
        for row in np.flatnonzero((self._logprobs[slots] >= 0) & (token_ids != NO_TOKEN)).tolist():
            logprobs = logits[row].float().log_softmax(-1)
            chosen = int(token_ids[row])
            values, ids = logprobs.topk(min(int(self._logprobs[slots[row]]), logits.shape[1]))
            report[row] = {chosen: float(logprobs[chosen]), **dict(zip(ids.tolist(), values.tolist(), strict=True))}
        return report


def _uniform(seeds: np.ndarray, indexes: np.ndarray) -> np.ndarray:
    """float64 [S, NUMBERS] in [0, 1): of the SplitMix64 stream (Steele et al. 2014) that each seed starts, the numbers
    that belong to the `indexes`-th token."""
    with np.errstate(over="ignore"):
        place = indexes.astype(np.uint64)[:, None] * np.uint64(NUMBERS) + np.arange(1, NUMBERS + 1, dtype=np.uint64)
        state = _mix(seeds + _GOLDEN)[:, None] + place * _GOLDEN
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
