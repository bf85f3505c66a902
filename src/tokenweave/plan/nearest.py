"""Plans by what was run: on a GPU a measured plan tells more than any simulation of waves and libraries."""

from dataclasses import dataclass
from math import log

from tokenweave.plan.scan import GRAIN
from tokenweave.plan.shape import StepShape
from tokenweave.plan.step import StepPlan
from tokenweave.plan.table import TunedTable

TIE = 0.005  # fused rather than serial, serial or fused rather than woven, where they differ by less


@dataclass(frozen=True)
class _Size:
    tokens: int
    seconds: dict[StepPlan, float]

    def best(self, mode: str) -> StepPlan | None:
        """The fastest plan of a mode; of "auto", what is right and not slower than serial or fused."""
        if mode != "auto":
            found = [plan for plan in self.seconds if plan.mode == mode]
            return min(found, key=lambda plan: self.seconds[plan], default=None)
        choices = [plan for plan in map(self.best, ("fused", "serial", "weave")) if plan is not None]
        best = min(choices, key=lambda plan: self.seconds[plan])
        return next(plan for plan in choices if self.seconds[plan] <= (1 + TIE) * self.seconds[best])


def nearest_plan(table: TunedTable, shape: StepShape, mode: str) -> StepPlan | None:
    """The plan of a step from those that were run at the tuned size nearest to it; None if there is none of the mode.

    A size between two is woven only if both are, and its cut is in proportion, on a multiple of GRAIN.
    """
    sizes = _sizes(table)
    tokens = shape.tokens
    if not sizes or not tokens:
        return None
    near = min(sizes, key=lambda size: abs(log(size.tokens / tokens)))
    plan = near.best(mode)
    if plan is None or (_tiles(near.tokens) == _tiles(tokens) and plan.cut < tokens):
        return plan
    around = [max((s for s in sizes if s.tokens <= tokens), key=lambda s: s.tokens, default=near),
              min((s for s in sizes if s.tokens >= tokens), key=lambda s: s.tokens, default=near)]  # fmt: skip
    if mode == "auto":
        for size in around:
            other = size.best("auto")
            if other is not None and other.mode != "weave":
                return other
    if plan.mode != "weave":
        return plan
    cut = round(plan.cut * tokens / near.tokens / GRAIN) * GRAIN
    cut = min(max(cut, 1), tokens - 1) if tokens > 1 else 0
    return StepPlan("weave", cut, plan.budget, plan.narrow)


def _sizes(table: TunedTable) -> list[_Size]:
    found: dict[int, dict[StepPlan, float]] = {}
    for check in table.checks:
        found.setdefault(sum(check.counts), {})[check.plan] = check.seconds
    return [_Size(tokens, seconds) for tokens, seconds in sorted(found.items())]


def _tiles(tokens: int) -> int:
    return -(-tokens // GRAIN)
