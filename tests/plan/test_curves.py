import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenweave.plan.curves import Curve

points = st.dictionaries(st.integers(1, 5000), st.floats(1e-6, 10), min_size=1, max_size=8)


@given(points, st.lists(st.floats(0, 20000), min_size=2, max_size=20))
def test_never_falls(points, tokens):
    seconds = [Curve.of(points)(n) for n in sorted(tokens)]
    assert all(b >= a - 1e-12 for a, b in zip(seconds, seconds[1:], strict=False))


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=8), st.floats(1, 20000))
def test_no_jumps(steps, tokens):
    sizes = tuple(1000 * (i + 1) for i in range(len(steps)))
    curve = Curve(sizes, tuple(np.cumsum(steps)))
    assert abs(curve(tokens + 1e-3) - curve(tokens)) < 1e-3 * 10 / 1000 + 1e-9


def test_goes_through_rising_measurements_and_between_them():
    curve = Curve.of({512: 3.0, 128: 1.0, 1024: 4.0})
    assert [curve(n) for n in (128, 320, 512, 768, 1024, 1536)] == [1.0, 2.0, 3.0, 3.5, 4.0, 5.0]
    assert curve(0) == 0 and curve(64) == pytest.approx(1.0 - 64 * 2 / 384)


@given(points)
def test_falling_measurements_are_pooled(points):
    """The isotonic fit is the max-min of the means of all stretches that hold a point."""
    values = [points[n] for n in sorted(points)]
    expected = [
        max(min(np.mean(values[a : b + 1]) for b in range(i, len(values))) for a in range(i + 1))
        for i in range(len(values))
    ]
    assert Curve.of(points).seconds == pytest.approx(expected)


def test_below_the_smallest_size_it_does_not_go_below_zero():
    assert Curve((100, 101), (1.0, 9.0))(1) == 0.0
    assert Curve((100,), (2.0,))(1) == 2.0 and Curve((100,), (2.0,))(300) == 6.0


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 2.0)), ((1, 1), (1.0, 2.0)), ((1,), (-1.0,)), ((1,), (float("nan"),))],
)
def test_what_is_no_curve_is_refused(sizes, seconds):
    with pytest.raises(ValueError):
        Curve(sizes, seconds)
