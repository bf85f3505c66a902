"""The clock and power that are seen beside what runs."""

import math
import time

import pytest
import torch

from tokenweave.execute import power
from tokenweave.execute.power import PowerMeter


def look_for(seconds: float) -> PowerMeter:
    with PowerMeter(torch.device("cuda", 0)) as meter:
        time.sleep(seconds)
    return meter


def test_the_second_half_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "SAMPLE_SECONDS", 0.001)
    clocks = iter([1980] * 10 + [1500] * 100000)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: next(clocks))
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 650_000)
    meter = look_for(0.5)
    assert len(meter._seen) > 20
    assert meter.mhz == 1500 and meter.watts == 650


@pytest.mark.parametrize("error", [ModuleNotFoundError("pynvml does not seem to be installed"), RuntimeError("none")])
def test_no_management_library(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> int:
        raise error

    monkeypatch.setattr(torch.cuda, "clock_rate", fail)
    meter = look_for(0.1)
    assert math.isnan(meter.mhz) and math.isnan(meter.watts)
