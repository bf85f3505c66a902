"""How long a step computed and communicated, as its own executor saw it."""

import time
from dataclasses import dataclass

from tokenweave.execute.streams import Pending


@dataclass
class StepClock:
    """Seconds of one step. communication: of the operations themselves; exposed: of them, while nothing computed."""

    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0
    _last: float = 0.0

    def start(self) -> None:
        self.compute = self.communication = self.exposed = 0.0
        self._last = time.perf_counter()

    def computed(self) -> None:
        """Since the last mark the rank computed."""
        self.compute += self._since()

    def communicated(self) -> None:
        """Since the last mark the rank communicated and computed nothing."""
        took = self._since()
        self.communication += took
        self.exposed += took

    def waited(self, pending: Pending) -> None:
        """Since the last mark the rank waited for an operation."""
        self.communication += pending.ended - pending.began
        self.exposed += self._since()

    @property
    def hidden(self) -> float:
        """Communication that ran under compute."""
        return max(self.communication - self.exposed, 0.0)

    def _since(self) -> float:
        now = time.perf_counter()
        took, self._last = now - self._last, now
        return took
