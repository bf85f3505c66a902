"""What callers may give as prompts and parameters, brought into one form and checked before anything is queued."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenweave.engine.params import SamplingParams
from tokenweave.engine.tokenizer import Tokenizer

Prompt = str | Sequence[int]


def as_list(prompts: Any) -> list[Prompt]:
    """One prompt, as text or token ids, or several. Raises ValueError for what is neither."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be text, a list of token ids, or a list of these, got {prompts!r}")
    items = list(prompts)
    return [items] if items and _is_number(items[0]) else items


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Parameters for each of `count` prompts: the same for all, or one each."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"there are {count} prompts and {len(params)} sampling parameters; give one, or one for each")
    return list(params)


def token_ids(prompt: Prompt, tokenizer: Tokenizer, *, vocab_size: int, context: int) -> list[int]:
    """A prompt's token ids. Raises ValueError if it is empty, longer than `context` or not of this vocabulary."""
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("the prompt is empty")
        ids = tokenizer.encode(prompt)
    else:
        try:
            if isinstance(prompt, (bytes, Mapping)):
                raise TypeError
            ids = [operator.index(token) for token in prompt]
        except TypeError:
            raise ValueError(f"a prompt must be text or a list of token ids, got {prompt!r}") from None
    if not ids:
        raise ValueError("the prompt is empty")
    if len(ids) > context:
        raise ValueError(f"the prompt has {len(ids)} tokens, the context is {context}: shorten it")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise ValueError(f"token ids must be in [0, {vocab_size}), got {wrong}")
    return ids


def _is_number(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
