"""The decision for one step, as a value that the executors follow."""

from dataclasses import dataclass

MODES = ("serial", "reordered", "fused", "weave", "nocomm")
MATMULS = ("qkv", "output", "gate_up", "down")  # of a layer, by which `narrow` counts


@dataclass(frozen=True)
class StepPlan:
    """How one step runs.

    mode: one of MODES. cut: tokens in the first lane when mode is "weave".
    budget: processors (GPU thread blocks) the communication kernel may use; None leaves it to the collective.
    narrow: which matmuls should count on the other processors only, as bits: bit len(MATMULS) * lane + i is MATMULS[i]
    of that lane.
    """

    mode: str
    cut: int = 0
    budget: int | None = None
    narrow: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.cut < 0:
            raise ValueError(f"cut must not be negative, got {self.cut}")
        if self.narrow and not (self.budget and 0 < self.narrow < 1 << 2 * len(MATMULS)):
            raise ValueError(f"narrow must be bits of {2 * len(MATMULS)} matmuls, with a budget, got {self.narrow}")

    def narrow_matmuls(self, lane: int) -> list[str]:
        """Names of the lane's matmuls that `narrow` has."""
        return [name for i, name in enumerate(MATMULS) if self.narrow >> (len(MATMULS) * lane + i) & 1]
