"""Costs as functions of the number of tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Curve:
    """Seconds at measured sizes; linear between them and never falling.

    Measurements that fall are pooled with their neighbours (isotonic regression), so that noise does not make a
    larger step look cheaper. Beyond the largest size the last slope goes on; below the smallest the first slope does,
    but not below zero: what it meets at no tokens is the fixed cost, the weights that are read and the launches.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError(f"a curve needs as many seconds as sizes, got {len(self.seconds)} and {len(self.sizes)}")
        if any(b <= a for a, b in zip(self.sizes, self.sizes[1:], strict=False)) or self.sizes[0] < 0:
            raise ValueError(f"sizes of a curve must rise from 0 or more, got {self.sizes}")
        if not all(np.isfinite(s) and s >= 0 for s in self.seconds):
            raise ValueError(f"seconds of a curve must be finite and not negative, got {self.seconds}")
        object.__setattr__(self, "seconds", _isotonic(self.seconds))

    @classmethod
    def of(cls, points: Mapping[int, float]) -> "Curve":
        """A curve through {tokens: seconds}, in any order."""
        sizes = tuple(sorted(points))
        return cls(sizes, tuple(float(points[size]) for size in sizes))

    def __call__(self, tokens: float) -> float:
        """Seconds for `tokens`; nothing for no tokens."""
        sizes, seconds = self.sizes, self.seconds
        if tokens <= 0:
            return 0.0
        if len(sizes) == 1:
            return seconds[0] * max(1.0, tokens / max(sizes[0], 1))  # a single point: constant, then proportional
        if tokens < sizes[0]:
            slope = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
            return max(0.0, seconds[0] - slope * (sizes[0] - tokens))
        if tokens > sizes[-1]:
            slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
            return seconds[-1] + slope * (tokens - sizes[-1])
        return float(np.interp(tokens, sizes, seconds))


def _isotonic(values: Sequence[float]) -> tuple[float, ...]:
    """Least-squares non-decreasing fit: pool adjacent violators."""
    blocks: list[list[float]] = []  # [mean, count]
    for value in values:
        blocks.append([float(value), 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, count = blocks.pop()
            total = blocks[-1][1] + count
            blocks[-1] = [(blocks[-1][0] * blocks[-1][1] + mean * count) / total, total]
    return tuple(mean for mean, count in blocks for _ in range(int(count)))
