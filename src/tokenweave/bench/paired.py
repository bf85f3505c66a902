"""What a claim of "never slower" rests on: a bound of the ratio of two times taken side by side."""

import math

import numpy as np

LEAST_ROUNDS = 5  # with fewer not even the largest ratio is a bound


def upper_bound(ratios: np.ndarray) -> float:
    """The upper 95 % bound of the median ratio, whatever their distribution: somebody else's work on the machine makes
    some of them large, which would say nothing of the two times that are compared.

    The k-th smallest of n is below the true median if k or more of them are, each with probability 1/2. The smallest k
    is taken for which that has at most 5 %.

    Raises ValueError for fewer than LEAST_ROUNDS.
    """
    n = len(ratios)
    if n < LEAST_ROUNDS:
        raise ValueError(f"a bound takes at least {LEAST_ROUNDS} rounds, got {n}")
    below, k = 0, 0  # of 2**n equally likely outcomes, those with fewer than k ratios below the median
    while below < 0.95 * 2**n:
        below += math.comb(n, k)
        k += 1
    return float(np.sort(ratios)[k - 1])
