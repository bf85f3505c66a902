"""Which tokens a step sees: a function of seed and step alone, so that a run goes on where it stopped, at any tp."""

from functools import lru_cache

import numpy as np
import torch

from tokenweave.layers.batch import Batch
from tokenweave.train.tokens import TokenFile


class Windows:
    """Windows of `length` tokens and the token after each, laid out anew in every pass over the text.

    tokens: ids, one after the other. A pass starts at another offset and takes the windows in another order; what does
    not fill a window at its ends is left out. Raises ValueError if the text is shorter than two windows.
    """

    def __init__(self, tokens: np.ndarray | TokenFile, length: int, seed: int) -> None:
        if len(tokens) < 2 * length + 1:
            raise ValueError(f"the text has {len(tokens)} tokens; windows of {length} need at least {2 * length + 1}")
        self.tokens, self.length, self.seed = tokens, length, seed
        self.per_pass = (len(tokens) - length) // length
        self._order = lru_cache(maxsize=2)(self._draw)

    def rows(self, start: int, count: int) -> np.ndarray:
        """Windows start, start + 1, ... of the run: int64 [count, length + 1]."""
        return np.stack([self._window(index) for index in range(start, start + count)])

    def _window(self, index: int) -> np.ndarray:
        passed, place = divmod(index, self.per_pass)
        offset, order = self._order(passed)
        begin = offset + int(order[place]) * self.length
        return self.tokens[begin : begin + self.length + 1].astype(np.int64)

    def _draw(self, passed: int) -> tuple[int, np.ndarray]:
        draw = np.random.default_rng((self.seed, passed))
        return int(draw.integers(self.length)), draw.permutation(self.per_pass)


class InOrder:
    """Windows that cover `tokens` once, for scoring, the last token of each the next one's first. What does not fill a
    window at the end is left out."""

    def __init__(self, tokens: np.ndarray | TokenFile, length: int) -> None:
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.length

    def rows(self, start: int, count: int) -> np.ndarray:
        """Windows start, start + 1, ..., as many as there are up to `count`: int64 [count, length + 1]."""
        stop = min(start + count, len(self))
        tokens = self.tokens[start * self.length : stop * self.length + 1]
        return np.lib.stride_tricks.sliding_window_view(tokens, self.length + 1)[:: self.length].astype(np.int64)


def as_batch(windows: np.ndarray, device: str) -> tuple[Batch, torch.Tensor]:
    """A batch of one prompt a window, and the target of each of its tokens, int64 [windows * length]."""
    count, length = windows.shape[0], windows.shape[1] - 1
    ids = torch.from_numpy(windows).to(device)
    batch = Batch(
        token_ids=ids[:, :-1].reshape(-1),
        positions=torch.arange(length, device=device).repeat(count),
        query_offsets=torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=device),
        context_lengths=torch.full((count,), length, dtype=torch.int32, device=device),
    )
    return batch, ids[:, 1:].reshape(-1)
