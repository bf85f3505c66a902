from typing import Any

import pytest

from tokenweave.engine.config import EngineConfig


def test_defaults_are_valid() -> None:
    assert EngineConfig().tensor_parallel_size == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "fast"), ("dtype", "int8"), ("device", "tpu"), ("collective", "mpi"), ("tensor_parallel_size", 0),
        ("tensor_parallel_size", None), ("block_size", 0), ("kv_cache_memory", 0), ("max_tokens_per_step", -5),
        ("max_tokens_per_step", 2.5), ("max_running_requests", 0), ("max_model_len", 0), ("threads", 0), ("timeout", 0),
        ("timeout", float("nan")),
    ],
)  # fmt: skip
def test_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        EngineConfig(**{name: value})
