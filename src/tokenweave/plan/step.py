"""The decision for one step, as a value that the executors follow."""

from dataclasses import dataclass

MODES = ("serial", "reordered", "fused", "weave", "nocomm")


@dataclass(frozen=True)
class StepPlan:
    """How one step runs.

    mode: one of MODES. cut: tokens in the first lane when mode is "weave".
    budget: processors (GPU thread blocks) the communication kernel may use; None leaves it to the collective.
    """

    mode: str
    cut: int = 0
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.cut < 0:
            raise ValueError(f"cut must not be negative, got {self.cut}")
