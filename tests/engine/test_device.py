import sys

import pytest
import torch
from plan.known_models import LLAMA_70B

from tokenweave.engine import device, llm


def test_as_many_gpus_as_torch_sees() -> None:
    assert device.gpu_count() == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_torch_for_cpus_only_has_none(monkeypatch) -> None:
    monkeypatch.setattr(device, "version", lambda package: "2.13.0+cpu")
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: sys.exit("the driver must not be asked"))
    assert device.gpu_count() == 0


def test_no_driver_is_no_gpu(monkeypatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(device, "version", lambda package: "2.11.0+cu130")
    monkeypatch.setattr(device.ctypes, "CDLL", absent)
    assert device.gpu_count() == 0


@pytest.mark.parametrize(
    "gpus, ranks, collective, chosen",
    [
        (0, 1, "auto", "cpu"), (1, 1, "auto", "cuda"), (1, 2, "auto", "cpu"), (2, 2, "auto", "cuda"),
        (8, 2, "shared_memory", "cpu"), (1, 8, "emulated", "cuda"), (2, 2, "distributed", "cuda"),
        (1, 2, "distributed", "cpu"),
    ],
)  # fmt: skip
def test_auto_is_the_gpus_where_each_rank_has_one(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, collective: str, chosen: str
) -> None:
    monkeypatch.setattr(device, "gpu_count", lambda: gpus)
    config = llm.EngineConfig(tensor_parallel_size=ranks, collective=collective)
    assert llm.resolved(config, LLAMA_70B).device == chosen
