"""How long a step computed and communicated on a GPU, from events between its launches."""

import torch

from tokenweave.execute.gpu_stream import PendingOnStream


class GpuClock:
    """Seconds of one step, as StepClock has them. Reading them waits for the step.

    A replayed graph is timed as a whole: all of it counts as compute.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._operations: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._totals: dict[str, float] | None = None

    @property
    def runs(self) -> bool:
        """Not in a capture, where no time passes."""
        return not torch.cuda.is_current_stream_capturing()

    def start(self) -> None:
        if self.runs:
            self._marks, self._operations, self._totals = [], [], None
            self._mark("start")

    def computed(self) -> None:
        self._mark("compute")

    def communicated(self) -> None:
        self._mark("communication")

    def waited(self, pending: PendingOnStream) -> None:
        """The current stream has been told to wait for the operation."""
        self._mark("exposed")
        if pending.began is not None and self.runs:
            self._operations.append((pending.began, pending.ended))

    @property
    def compute(self) -> float:
        return self._total("compute")

    @property
    def communication(self) -> float:
        return self._total("communication")

    @property
    def exposed(self) -> float:
        return self._total("exposed")

    @property
    def hidden(self) -> float:
        return max(self.communication - self.exposed, 0.0)

    def _mark(self, kind: str) -> None:
        if self.runs:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((kind, event))

    def _total(self, kind: str) -> float:
        if self._totals is None:
            self._totals = self._added()
        return self._totals[kind]

    def _added(self) -> dict[str, float]:
        totals = {"compute": 0.0, "communication": 0.0, "exposed": 0.0}
        if not self._marks:
            return totals
        self._marks[-1][1].synchronize()
        for (_, before), (kind, event) in zip(self._marks, self._marks[1:], strict=False):
            took = before.elapsed_time(event) / 1e3
            totals[kind] += took
            if kind == "communication":
                totals["exposed"] += took
        totals["communication"] += sum(began.elapsed_time(ended) for began, ended in self._operations) / 1e3
        return totals
