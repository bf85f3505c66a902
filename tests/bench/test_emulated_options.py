"""What engines of a benchmark are told, by the model that was named and by mode."""

import argparse
from pathlib import Path

import pytest

from tokenweave.bench import emulated
from tokenweave.engine import device
from tokenweave.engine.config import EngineConfig


def arguments(model: str | None, emulate_tp: int | None = None) -> argparse.Namespace:
    return argparse.Namespace(model=model, emulate_tp=emulate_tp, traffic="multicast")


def test_a_checkpoint_is_left_as_it_is() -> None:
    assert emulated.chosen_model(arguments("some/model")) == ("some/model", {})
    assert emulated.beside_others({}) == {}


@pytest.mark.parametrize("emulate_tp", [None, 8])
def test_dimensions_have_random_weights(
    emulate_tp: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory, options = emulated.chosen_model(arguments("Llama-3.1-8B", emulate_tp))
    config = EngineConfig(**emulated.beside_others(options))
    assert (config.weights, config.device) == ("random", "cuda")
    assert config.dtype == ("bfloat16" if emulate_tp else "auto")
    assert config.kv_cache_memory == emulated.CACHE
    assert (config.collective, config.tensor_parallel_size) == (("emulated", 8) if emulate_tp else ("auto", 1))
    assert directory is not None and "Llama-3.1-8B" in str(directory)


@pytest.mark.parametrize("gpus, size, by_nccl", [(2, 2, True), (1, 2, False), (0, 2, False), (2, 1, False)])
def test_the_baselines_on_gpus_go_by_nccl(gpus: int, size: int, by_nccl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_count", lambda: gpus)
    for mode in ("serial", "reordered"):
        assert emulated.plainly(mode, size) == ({"collective": "distributed"} if by_nccl else {})
    for mode in ("fused", "weave", "auto"):
        assert emulated.plainly(mode, size) == {}
