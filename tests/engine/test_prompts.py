from typing import Any

import numpy as np
import pytest

from tokenweave.engine.params import SamplingParams
from tokenweave.engine.prompts import as_list, as_params, token_ids


class Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(c) - 97 for c in text]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ([], []),
        (("a", [1]), ["a", [1]]),
    ],
)  # fmt: skip
def test_one_or_several(given: Any, expected: list[Any]) -> None:
    assert as_list(given) == expected


def test_arrays_are_token_ids() -> None:
    assert token_ids(as_list(np.array([1, 2]))[0], Letters(), vocab_size=26, context=9) == [1, 2]  # type: ignore[arg-type]


def test_parameters_for_all_or_each() -> None:
    one, two = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    assert as_params(None, 2) == [SamplingParams()] * 2
    assert as_params(one, 3) == [one] * 3 and as_params([one, two], 2) == [one, two]
    with pytest.raises(ValueError, match="2 prompts and 1 "):
        as_params([one], 2)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"), ([], "empty"), ([0] * 10, "10 tokens"), ("a" * 10, "10 tokens"), ([26], "got 26"),
        ([-1], "got -1"),
        ([1.5], "token ids"), (3, "token ids"), (None, "token ids"), ([[1]], "token ids"),
    ],
)  # fmt: skip
def test_refused(prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_ids(prompt, Letters(), vocab_size=26, context=9)  # type: ignore[arg-type]


def test_as_long_as_the_context() -> None:
    assert token_ids("abcdefghi", Letters(), vocab_size=26, context=9) == list(range(9))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"prompt": "ab"}, b"ab", None, 5])
def test_neither_text_nor_ids(wrong: Any) -> None:
    with pytest.raises(ValueError, match="prompts must be text"):
        as_list(wrong)
    with pytest.raises(ValueError, match="a prompt must be text or a list"):
        token_ids(wrong, Letters(), vocab_size=26, context=9)  # type: ignore[arg-type]
