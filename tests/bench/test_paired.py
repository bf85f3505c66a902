"""The bound against every way in which so few ratios can fall on either side of their median."""

from itertools import product

import numpy as np
import pytest

from tokenweave.bench.paired import upper_bound


@pytest.mark.parametrize("n", range(5, 16))
def test_bound_of_the_median(n: int) -> None:
    """Of all 2**n equally likely outcomes in 95 % or more the bound is above the median; one rank lower it is not."""
    sides = np.array(list(product((False, True), repeat=n)))  # whether each ratio is below the median
    below = sides.sum(axis=1)  # the k-th smallest is above the median where fewer than k are below it
    ratios = np.random.default_rng(n).permutation(n) + 1.0
    k = upper_bound(ratios)
    assert (below < k).mean() >= 0.95 > (below < k - 1).mean()


def test_a_few_disturbed_rounds_do_not_matter() -> None:
    quiet = np.linspace(0.98, 1.0, 15)
    disturbed = np.where(np.arange(15) < 13, quiet, 9.0)
    assert upper_bound(disturbed) == upper_bound(quiet) < 1.0


def test_too_few() -> None:
    with pytest.raises(ValueError, match="at least 5 rounds, got 4"):
        upper_bound(np.ones(4))
