"""The interval that the plugin's benchmark gives; what it times needs vLLM."""

import random

import pytest

from tokenweave.integrations.vllm.benchmark import interval


@pytest.mark.parametrize(("count", "first", "last"), [(6, 0, 5), (9, 1, 7), (15, 3, 11), (30, 9, 20)])
def test_the_interval_is_the_one_of_the_sign_test(count: int, first: int, last: int) -> None:
    """As tabulated, for the median at 95 %."""
    values = [float(i) for i in range(count)]
    random.Random(count).shuffle(values)
    assert interval(values) == (first, last)


@pytest.mark.parametrize("count", [6, 15, 33])
def test_the_interval_holds_the_median_as_often_as_it_says(count: int) -> None:
    draws = random.Random(7)
    held = 0
    for _ in range(2000):
        lowest, highest = interval([draws.gauss(0, 1) ** 3 for _ in range(count)])
        held += lowest <= 0 <= highest
    assert 0.94 < held / 2000 < 0.99


@pytest.mark.parametrize("count", [0, 1, 5])
def test_too_few_values_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"at least 6 values, got {count}"):
        interval([1.0] * count)
