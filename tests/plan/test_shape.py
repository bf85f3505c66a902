import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenweave.plan.shape import Load, StepShape

requests = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 50)), max_size=6)


def attended(requests, tokens):
    """Oracle: (request, query position, key position) of every pair that the tokens of the range compute."""
    flat = [(r, cached + i) for r, (count, cached) in enumerate(requests) for i in range(count)]
    return {(r, query, key) for r, query in flat[tokens] for key in range(query + 1)}


def load(requests, tokens):
    pairs = attended(requests, tokens)
    last = {(r, count + cached - 1) for r, (count, cached) in enumerate(requests) if count}
    queries = {(r, query) for r, query, _ in pairs}
    return Load(len(queries), len(pairs), len({(r, key) for r, _, key in pairs}), len(queries & last))


@given(requests, st.data())
def test_every_cut_shares_out_the_pairs(requests, data):
    shape = StepShape([n for n, _ in requests], [n + cached for n, cached in requests])
    total = sum(n for n, _ in requests)
    cut = data.draw(st.integers(0, total))
    assert shape.tokens == total
    assert shape.load() == load(requests, slice(0, total))
    assert shape.loads(cut) == (load(requests, slice(0, cut)), load(requests, slice(cut, total)))


def test_borders_are_inside_the_step():
    assert StepShape([5, 1, 0, 9], [5, 25, 7, 12]).borders() == [5, 6]
    assert StepShape.prefill(33).borders() == [] == StepShape([], []).borders()


def test_the_second_lane_attends_to_the_first():
    first, second = StepShape.prefill(1000, cached=24).loads(500)
    assert first.pairs + second.pairs == StepShape.prefill(1000, cached=24).load().pairs
    assert second.pairs - first.pairs == 500 * 500
    assert StepShape.decode(3, 577).load() == Load(3, 3 * 577, 3 * 577, 3)


@pytest.mark.parametrize(("counts", "contexts"), [([1], [0]), ([-1], [3]), ([1, 2], [3]), ([[1]], [[1]])])
def test_impossible_requests_are_refused(counts, contexts):
    with pytest.raises(ValueError):
        StepShape(counts, contexts)


@pytest.mark.parametrize("cut", [-1, 14])
def test_a_cut_outside_the_step_is_refused(cut):
    with pytest.raises(ValueError, match="cut"):
        StepShape.prefill(13).loads(cut)


@pytest.mark.parametrize(
    ("tokens", "longest", "counts"), [(7, 7, [7]), (8, 7, [4, 4]), (15, 7, [5, 5, 5]), (3, 1, [1] * 3)]
)
def test_prompts_are_as_few_as_can_be(tokens, longest, counts):
    shape = StepShape.prompts(tokens, longest)
    assert shape.counts.tolist() == shape.contexts.tolist() == counts
