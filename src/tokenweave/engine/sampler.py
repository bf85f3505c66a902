"""From logits to token ids, all rows of a step at once."""

from dataclasses import dataclass

import numpy as np
import torch

from tokenweave.engine.greedy import largest
from tokenweave.engine.params import SamplingParams

# Shapes: S rows of logits, V vocabulary, K candidates.
CANDIDATES = 1024  # for top-k and top-p: topk(1024) of 49152 logits takes 0.4 ms a row, sorting them all 3 ms
ROWS = 64  # rows in work at a time: 64 x 49152 float64 sums are 25 MB


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
        """One token for each row. logits: [S, V]. slots: [S], whose row it is. indexes: [S], which of its tokens."""
        random = np.flatnonzero(self._temperature[slots] > 0)
        if len(random) == len(slots):
            token_ids = np.empty(len(slots), dtype=np.int32)
        else:
            token_ids = largest(logits)[1].numpy(force=True).astype(np.int32)
        for start in range(0, len(random), ROWS):
            rows = random[start : start + ROWS]
            chosen = logits[torch.from_numpy(rows).to(logits.device)].float()
            uniform = _uniform(self._seed[slots[rows]], indexes[rows])
            token_ids[rows] = self._draw(chosen, slots[rows], uniform).numpy(force=True)
        return Sampled(token_ids, self._report(logits, slots, token_ids))

    def _draw(self, logits: torch.Tensor, slots: np.ndarray, uniform: np.ndarray) -> torch.Tensor:
        device = logits.device
        temperature, top_p, top_k = (
            torch.from_numpy(values[slots]).to(device).unsqueeze(1)
            for values in (self._temperature, self._top_p, self._top_k)
        )
        # the maximum is taken out before dividing: at temperatures near zero the quotient overflows
        scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
        points = torch.from_numpy(uniform).to(device).unsqueeze(1)
        limited = ((top_k > 0) & (top_k < logits.shape[1]) | (top_p < 1)).squeeze(1)
        if not limited.any():
            return draw(scaled, points)
        token_ids = torch.empty(len(slots), dtype=torch.int64, device=device)
        token_ids[limited] = draw_limited(scaled[limited], points[limited], top_k[limited], top_p[limited])
        if not limited.all():
            token_ids[~limited] = draw(scaled[~limited], points[~limited])
        return token_ids

    def _report(self, logits: torch.Tensor, slots: np.ndarray, token_ids: np.ndarray) -> dict[int, dict[int, float]]:
        """Log-probabilities under the model's own distribution: before temperature, top-k and top-p, as in vLLM."""
        report = {}
        for row in np.flatnonzero(self._logprobs[slots] >= 0).tolist():
            logprobs = logits[row].float().log_softmax(-1)
            chosen = int(token_ids[row])
            values, ids = logprobs.topk(min(int(self._logprobs[slots[row]]), logits.shape[1]))
            report[row] = {chosen: float(logprobs[chosen]), **dict(zip(ids.tolist(), values.tolist(), strict=True))}
        return report


def draw(scaled: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulated probability passes `points`: ids [S].

    scaled: [S, V] log-weights, at most 0. points: [S, 1] in [0, 1). Sums in float64: in float32 rare tokens would
    vanish beside a sum near one.
    """
    mass = scaled.exp().cumsum(-1, dtype=torch.float64)
    picked = torch.searchsorted(mass, points * mass[:, -1:], right=True).squeeze(1)
    return picked.clamp_(max=scaled.shape[1] - 1)


def draw_limited(scaled: torch.Tensor, points: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The same among the top_k most likely tokens (0: all), and of these the fewest whose probability reaches top_p.

    Equal logits go by token id among CANDIDATES. Rows whose candidates are not enough go through a full sort; which
    rows, and hence the result, depends on the row alone.
    """
    total = scaled.exp().sum(-1, keepdim=True, dtype=torch.float64)
    few = min(CANDIDATES, scaled.shape[1])
    values, ids = scaled.topk(few)
    ids, by_id = ids.sort()
    values, by_value = values.gather(1, by_id).sort(descending=True, stable=True)
    ids = ids.gather(1, by_value)
    picked, enough = _pick(values, ids, points, top_k=top_k, top_p=top_p, total=total)
    if few < scaled.shape[1] and not enough.all():
        rest = ~enough
        values, ids = scaled[rest].sort(descending=True, stable=True)
        picked[rest], _ = _pick(values, ids, points[rest], top_k=top_k[rest], top_p=top_p[rest], total=total[rest])
    return picked


def _pick(
    values: torch.Tensor,
    ids: torch.Tensor,
    points: torch.Tensor,
    *,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    total: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """values, ids: [S, K], the most likely first. Token ids [S], and whether the K were enough to tell."""
    candidates = values.shape[1]
    outside = (torch.arange(candidates, device=values.device) >= top_k) & (top_k > 0)
    weights = values.exp().to(torch.float64).masked_fill(outside, 0)
    mass = weights.cumsum(-1)
    limit = top_p * torch.where(top_k > 0, mass[:, -1:], total)
    kept = (mass - weights < limit) & ~outside  # a token stays while those before it do not reach top_p
    kept[:, 0] = True
    last = kept.sum(-1, keepdim=True) - 1
    picked = torch.searchsorted(mass, points * mass.gather(1, last), right=True)
    enough = torch.where(top_k > 0, top_k <= candidates, mass[:, -1:] >= limit).squeeze(1)
    return ids.gather(1, torch.minimum(picked, last)).squeeze(1), enough


def _uniform(seeds: np.ndarray, indexes: np.ndarray) -> np.ndarray:
    """float64 in [0, 1): the `indexes`-th numbers of the SplitMix64 streams (Steele et al. 2014) that `seeds` start."""
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GOLDEN) + (indexes.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
