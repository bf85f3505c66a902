from typing import Any

import pytest

from tokenweave.engine.params import SamplingParams


def test_defaults_and_normal_forms() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, 0)
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2]).stop_token_ids == (1, 2)
    assert SamplingParams(temperature=0).greedy and SamplingParams(top_k=1).greedy and not params.greedy
    assert SamplingParams(max_tokens=0, top_k=-1, seed=0, logprobs=0).max_tokens == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "3"), ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")), ("top_p", 0.0), ("top_p", 1.01), ("top_p", float("nan")), ("top_k", -2),
        ("seed", -1), ("seed", 2**63), ("logprobs", -1), ("stop", [""]), ("stop", [3]), ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
    ],
)  # fmt: skip
def test_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})
