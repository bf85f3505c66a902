"""What a GPU's clock and power are while something runs on it."""

import threading
from types import TracebackType

import numpy as np
import torch

SAMPLE_SECONDS = 0.02


class PowerMeter:
    """A context manager that looks at a GPU's processor clock and power draw every SAMPLE_SECONDS.

    mhz, watts: means of what was seen in the second half of the time, when the clock has settled; not numbers where
    NVIDIA's management library (the package nvidia-ml-py) is not there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    @property
    def mhz(self) -> float:
        return self._mean(0)

    @property
    def watts(self) -> float:
        return self._mean(1)

    def __enter__(self) -> "PowerMeter":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        try:
            while not self._over.wait(SAMPLE_SECONDS):
                self._seen.append((torch.cuda.clock_rate(self._device), torch.cuda.power_draw(self._device) / 1e3))
        except (ImportError, RuntimeError):
            self._seen.clear()

    def _mean(self, column: int) -> float:
        late = self._seen[len(self._seen) // 2 :]
        return float(np.mean([row[column] for row in late])) if late else float("nan")
