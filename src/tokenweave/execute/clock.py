"""How long a step computed and communicated, as its own executor saw it."""

import time
from dataclasses import dataclass


@dataclass
class StepClock:
    """Seconds of one step. Communication that ran under compute is hidden, the rest is exposed."""

    compute: float = 0.0
    communication: float = 0.0
    hidden: float = 0.0
    _last: float = 0.0

    def start(self) -> None:
        self.compute = self.communication = self.hidden = 0.0
        self._last = time.perf_counter()

    def computed(self) -> None:
        """Since the last mark the rank computed."""
        now = time.perf_counter()
        self.compute += now - self._last
        self._last = now

    def communicated(self) -> None:
        """Since the last mark the rank communicated, and computed nothing."""
        now = time.perf_counter()
        self.communication += now - self._last
        self._last = now

    @property
    def exposed(self) -> float:
        return self.communication - self.hidden
