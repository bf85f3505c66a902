"""What the simulator and the choice read: one interface over measured and calculated costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tokenweave.plan.curves import Curve
from tokenweave.plan.shape import Load

LAYER = ("attention", "mlp")
STAGES = ("embed", *LAYER)
DEFAULT_BUDGET = 16  # what a collective takes where the plan leaves it to it


class Costs(Protocol):
    """Seconds on the slowest rank.

    layers: of the model; a step is the stage "embed", then LAYER that many times, then the head.
    contention: the least share by which a stage is slowed that starts while a collective runs beside it.
    budgets: processors that the fused operation may be given (None: the collective decides).
    grain: tokens to a multiple of which a cut is best rounded, the rows of a matmul tile.
    """

    @property
    def layers(self) -> int: ...

    @property
    def contention(self) -> float: ...

    @property
    def budgets(self) -> tuple[int | None, ...]: ...

    @property
    def grain(self) -> int: ...

    def compute(self, stage: str, load: Load, taken: int = 0) -> float:
        """One stage while `taken` processors belong to a collective for as long as the stage runs."""
        ...

    def head(self, rows: int) -> float:
        """Logits of `rows` tokens."""
        ...

    def norm(self, tokens: int) -> float:
        """Residual add and RMSNorm of every row on every rank."""
        ...

    def all_reduce(self, tokens: int) -> float: ...

    def reordered(self, tokens: int) -> float:
        """Reduce-scatter, add and RMSNorm of own rows, all-gather: three operations."""
        ...

    def fused(self, tokens: int, budget: int | None) -> float:
        """The fused operation on `budget` processors."""
        ...


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """Curves measured on a device, or taken from published figures.

    stages: seconds by tokens of each of STAGES, attention without its query-key pairs. pair_seconds, key_seconds:
    what attention costs per pair and per key read, whichever is more. fused_curves: one curve per budget.
    squeeze: calculated costs, whose ratio with and without the taken processors is applied; None leaves `contention`.
    """

    layers: int
    stages: Mapping[str, Curve]
    norm_curve: Curve
    all_reduce_curve: Curve
    reordered_curve: Curve
    fused_curves: Mapping[int | None, Curve]
    pair_seconds: float = 0.0
    key_seconds: float = 0.0
    head_curve: Curve | None = None
    contention: float = 0.0
    grain: int = 1
    squeeze: Costs | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        missing = [stage for stage in STAGES if stage not in self.stages]
        if missing or not self.fused_curves:
            raise ValueError(f"measured costs lack {', '.join(missing) or 'curves of the fused operation'}")
        if self.contention < 0 or self.pair_seconds < 0 or self.key_seconds < 0:
            raise ValueError("contention, pair_seconds and key_seconds must not be negative")

    @property
    def budgets(self) -> tuple[int | None, ...]:
        return tuple(self.fused_curves)

    def compute(self, stage: str, load: Load, taken: int = 0) -> float:
        seconds = self.stages[stage](load.tokens)
        if stage == "attention":
            seconds += max(load.pairs * self.pair_seconds, load.keys * self.key_seconds)
        if taken and self.squeeze is not None and seconds:
            seconds *= self.squeeze.compute(stage, load, taken) / self.squeeze.compute(stage, load)
        return seconds

    def head(self, rows: int) -> float:
        return self.head_curve(rows) if self.head_curve else 0.0

    def norm(self, tokens: int) -> float:
        return self.norm_curve(tokens)

    def all_reduce(self, tokens: int) -> float:
        return self.all_reduce_curve(tokens)

    def reordered(self, tokens: int) -> float:
        return self.reordered_curve(tokens)

    def fused(self, tokens: int, budget: int | None) -> float:
        curve = self.fused_curves.get(budget)
        if curve is None:  # not measured: as on the nearest number that was
            near = min(self.fused_curves, key=lambda known: abs((known or DEFAULT_BUDGET) - (budget or DEFAULT_BUDGET)))
            curve = self.fused_curves[near]
        return curve(tokens)
