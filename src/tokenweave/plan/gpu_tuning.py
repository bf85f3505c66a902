"""How a GPU is measured: as other machines are, but cuts are found by running them, and what was run is what is chosen.

Trials run as CUDA graphs on a quiet device: three rounds tell two plans apart by 1 %.
"""

from tokenweave.plan.costs import MeasuredCosts
from tokenweave.plan.nearest import nearest_plan
from tokenweave.plan.scan import FEWEST, Scan
from tokenweave.plan.shape import StepShape
from tokenweave.plan.step import StepPlan
from tokenweave.plan.table import Check, TunedTable
from tokenweave.plan.trial import Trial
from tokenweave.plan.tuning import FUSED, REORDERED, SERIAL, Regret, Tuner

FEW, MANY = 2, 6  # layers: the difference is what a layer within a model takes
CURVE_LAYERS = 4
ROUNDS = {4096: 9, 8192: 5, 1 << 62: 3}  # up to so many tokens
LEAST_WOVEN = 2 * FEWEST
WOVEN = 2  # of a size that are kept


class GpuTuner(Tuner):
    """Measures costs, then for each size scans woven plans and runs the best of every mode."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._curve_seconds, self._rounds = 0.1, range(3, 8)

    def fit(self, costs: MeasuredCosts) -> float:
        """Not fitted: cuts are not chosen by it."""
        self._report("contention")
        return self._hardware.contention

    def _some_layers(self, tokens: int, seconds: float) -> int:
        """Few at any size: the weights of four layers of a large model do not fit a GPU's caches."""
        return min(CURVE_LAYERS, self._layers)

    def check(self, costs: MeasuredCosts, size: int) -> list[Check]:
        self._report(f"plans of {size} tokens")
        shape = self._shape(size)
        woven: list[StepPlan] = []
        if size >= LEAST_WOVEN:
            woven = [plan for plan, _ in Scan(self._trials).best(shape).plans[:WOVEN]]
        plans = (SERIAL, *self._budgeted, *woven)
        seconds = self._whole(shape, plans)
        counts, contexts = tuple(shape.counts.tolist()), tuple(shape.contexts.tolist())
        self.unrest[size] = 0.0
        return [Check(counts, contexts, plan, seconds[plan]) for plan in plans]

    def regret(self, table: TunedTable, size: int) -> Regret:
        """Against all cuts in steps of 64 tokens with each of four budgets, and the other modes."""
        shape = self._shape(size)
        chosen = nearest_plan(table, shape, "auto") or SERIAL
        every = [plan for plan, _ in Scan(self._trials).every(shape).plans] if size >= LEAST_WOVEN else []
        plans = tuple(dict.fromkeys((chosen, SERIAL, FUSED, REORDERED, *self._budgeted, *every)))
        seconds = self._whole(shape, plans)
        best = min(seconds, key=lambda plan: seconds[plan])
        return Regret(size, chosen, seconds[chosen], best, seconds[best])

    def _whole(self, shape: StepShape, plans: tuple[StepPlan, ...]) -> dict[StepPlan, float]:
        """Seconds of a step of all layers, from what one of FEW and one of MANY take."""
        rounds = next(count for most, count in ROUNDS.items() if shape.tokens <= most)
        few, many = min(FEW, self._layers), min(MANY, self._layers)
        first, second = (
            self._trials.run(Trial.of(shape, plans, rounds=rounds, layers=layers, parts=False))
            for layers in (few, many)
        )
        layer = [(second.step(i) - first.step(i)) / max(many - few, 1) for i in range(len(plans))]
        return {plan: first.step(i) + (self._layers - few) * layer[i] for i, plan in enumerate(plans)}
