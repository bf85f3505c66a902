import pytest

from tokenweave.plan.fit import fit_contention


@pytest.mark.parametrize("truth", [0.0, 0.013, 0.2, 0.499])
def test_finds_the_constant_that_made_the_times(truth):
    compute = [1.0, 3.0, 10.0]
    found = fit_contention(lambda c: [t * (1 + c) for t in compute], [t * (1 + truth) for t in compute])
    assert found == pytest.approx(truth, abs=1e-3)


@pytest.mark.parametrize("observed", [[], [0.0]])
def test_nothing_to_fit_to(observed):
    with pytest.raises(ValueError):
        fit_contention(lambda c: observed, observed)


def test_where_all_do_as_well_the_largest_is_taken():
    assert fit_contention(lambda contention: [1 + min(contention, 0.1)], [1.3]) == pytest.approx(0.5, abs=1e-3)
