import sys

import torch

from tokenweave.engine import device


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
