"""Fitting the one constant that costs cannot be measured without."""

from collections.abc import Callable, Sequence
from math import sqrt

GOLDEN = (sqrt(5) - 1) / 2


def fit_contention(
    predict: Callable[[float], Sequence[float]], observed: Sequence[float], *, most: float = 0.5
) -> float:
    """The contention in [0, most] at which `predict(contention)`, seconds of woven steps, comes closest to those
    observed: least squares of the relative errors, found by golden-section search to 0.0005.
    Where all do as well, the largest: where nothing is hidden, less would promise something.
    """
    if not observed or min(observed) <= 0:
        raise ValueError(f"contention is fitted to positive times of woven steps, got {list(observed)}")

    def error(contention: float) -> float:
        return sum((p / o - 1) ** 2 for p, o in zip(predict(contention), observed, strict=True))

    low, high = 0.0, most
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    error_left, error_right = error(left), error(right)
    while high - low > 1e-3:
        if error_left < error_right:
            high, right, error_right = right, left, error_left
            left = high - GOLDEN * (high - low)
            error_left = error(left)
        else:
            low, left, error_left = left, right, error_right
            right = low + GOLDEN * (high - low)
            error_right = error(right)
    return (low + high) / 2
