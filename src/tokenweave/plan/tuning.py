"""How a machine is measured: from timed steps to a tuned table. What runs the steps is handed in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tokenweave.plan.choose import HIDES_NOTHING, ranked
from tokenweave.plan.costs import STAGES, MeasuredCosts
from tokenweave.plan.curves import Curve
from tokenweave.plan.fit import fit_contention
from tokenweave.plan.hardware import Hardware
from tokenweave.plan.planner import Planner
from tokenweave.plan.shape import StepShape
from tokenweave.plan.simulate import simulate
from tokenweave.plan.step import StepPlan
from tokenweave.plan.table import Check, TunedTable, TuneKey
from tokenweave.plan.trial import Trial, TrialResult, Trials

SERIAL, FUSED, REORDERED, NOCOMM = (StepPlan(mode) for mode in ("serial", "fused", "reordered", "nocomm"))
BEST = 3  # candidates of a size that are run
HEAD_ROWS = (1, 16, 64)
# A stage is the same in every layer, so of a slow step some layers are enough for its curves: a sixth of a second's
# worth. Quick steps run whole, since the weights of a few layers would stay in caches that those of all do not fit.
CURVE_STEP, CHECK_STEP = 0.15, 1.0
CURVE_SECONDS, CHECK_SECONDS = 1.0, 6.0  # for all rounds of a trial
ROUNDS = range(3, 22)
MOST_CONTENTION = 2.0
SCAN = 16  # of these parts of a step the exhaustive scan cuts off 1, 2, ...


@dataclass(frozen=True)
class Regret:
    """Of one size: the plan that is chosen and the best of a scan, with the seconds both took."""

    tokens: int
    chosen: StepPlan
    chosen_seconds: float
    best: StepPlan
    best_seconds: float


class Tuner:
    """Measures costs, fits the contention and checks candidates, size by size.

    sizes: tokens of the steps to tune for. layers: of the model. context: the most keys a request may have.
    report: told what is measured next.
    """

    def __init__(
        self,
        trials: Trials,
        sizes: Sequence[int],
        *,
        layers: int,
        context: int,
        hardware: Hardware,
        report: Callable[[str], None] = lambda what: None,
    ) -> None:
        if not sizes or min(sizes) < 1:
            raise ValueError(f"tokens must be at least 1, got {list(sizes)}")
        self._trials, self._layers, self._context = trials, layers, context
        self._hardware, self._grain, self._report = hardware, hardware.tiles[0].rows, report
        self.sizes = sorted(set(sizes))
        self.curve_sizes = sorted({*self.sizes, *(size // 2 for size in self.sizes if size > 1)})  # and their lanes
        self.unrest: dict[int, float] = {}  # by size: see TrialResult.unrest
        # the fused operation on so many processors, beside the collective's own choice
        self._budgeted = tuple(StepPlan("fused", budget=budget) for budget in hardware.budgets)
        self._curve_seconds, self._rounds = CURVE_SECONDS, ROUNDS
        self._per_token = 0.0  # seconds of a step, of the largest size so far

    @property
    def reports(self) -> int:
        """How often `report` is called by `tune`."""
        return len(self.curve_sizes) + len(self.sizes) + 3

    def tune(self, key: TuneKey) -> TunedTable:
        costs = self.measure()
        costs = replace(costs, contention=self.fit(costs))
        checks = [check for size in self.sizes for check in self.check(costs, size)]
        return TunedTable(key, costs, tuple(checks))

    def measure(self) -> MeasuredCosts:
        """Every curve; the contention is left at 0."""
        self._report("attention by context")
        key_seconds = self._key_seconds()
        results = {size: self._curve_point(size) for size in self.curve_sizes}
        self._report("attention by pairs")
        pair_seconds = self._pair_seconds(results, key_seconds)
        stages = {stage: {size: result.stage(stage) for size, result in results.items()} for stage in STAGES}
        for size in results:
            load = self._shape(size).load()
            scores = max(load.pairs * pair_seconds, load.keys * key_seconds)
            stages["attention"][size] = max(0.0, stages["attention"][size] - scores)
        norm = {size: result.reduction(3) for size, result in results.items()}
        return MeasuredCosts(
            layers=self._layers,
            stages={stage: Curve.of(points) for stage, points in stages.items()},
            norm_curve=Curve.of(norm),
            all_reduce_curve=Curve.of({n: max(0.0, result.reduction(0) - norm[n]) for n, result in results.items()}),
            reordered_curve=Curve.of({size: result.reduction(2) for size, result in results.items()}),
            fused_curves=self._fused_curves(results),
            pair_seconds=pair_seconds,
            key_seconds=key_seconds,
            head_curve=self._head_curve(),
            grain=self._grain,
        )

    def _fused_curves(self, results: dict[int, TrialResult]) -> dict[int | None, Curve]:
        if not self._budgeted:
            return {None: Curve.of({size: result.reduction(1) for size, result in results.items()})}
        return {
            plan.budget: Curve.of({size: result.reduction(4 + i) for size, result in results.items()})
            for i, plan in enumerate(self._budgeted)
        }

    def fit(self, costs: MeasuredCosts) -> float:
        """The contention by which the simulator comes closest to woven steps: that of the hardware if all sizes are too
        small to weave, or if it hides nothing."""
        self._report("contention")
        if self._hardware.contention >= HIDES_NOTHING:
            return self._hardware.contention
        woven: list[tuple[int, int, float]] = []  # tokens, layers, and seconds relative to the fused step
        for size in [size for size in self.sizes if size >= 2 * self._grain][-3:]:
            layers = self._some_layers(size, CURVE_STEP)
            result = self._run(self._shape(size), (FUSED, StepPlan("weave", size // 2)), CURVE_SECONDS, layers)
            woven.append((size, layers, result.paired(1, 0) / result.step(0)))
        if not woven:
            return self._hardware.contention

        def predict(contention: float) -> list[float]:
            found = []
            for size, layers, _ in woven:
                model, shape = replace(costs, contention=contention, layers=layers), self._shape(size)
                plan = StepPlan("weave", size // 2)
                found.append(simulate(model, shape, plan).seconds / simulate(model, shape, FUSED).seconds)
            return found

        return fit_contention(predict, [ratio for _, _, ratio in woven], most=MOST_CONTENTION)

    def check(self, costs: MeasuredCosts, size: int) -> list[Check]:
        """Run the candidates that promise most, beside fused and serial, and the best woven one: a mode that never ran
        at a size would be chosen there by how it did at others."""
        self._report(f"candidates of {size} tokens")
        shape, layers = self._shape(size), self._some_layers(size, CHECK_STEP)
        best = [plan for plan, _ in ranked(costs, shape)]
        woven = [plan for plan in best if plan.mode == "weave"]
        plans = tuple(dict.fromkeys((SERIAL, FUSED, *best[:BEST], *woven[:1])))
        result = self._run(shape, plans, CHECK_SECONDS, layers)
        counts, contexts = tuple(shape.counts.tolist()), tuple(shape.contexts.tolist())
        self.unrest[size] = result.unrest(1)
        return [
            Check(counts, contexts, plan, result.paired(i, 1) * self._scale(costs, shape, plan, layers))
            for i, plan in enumerate(plans)
        ]

    def regret(self, table: TunedTable, size: int) -> Regret:
        """Run the plan that the table chooses, all modes and a scan of cuts in one trial."""
        shape, layers = self._shape(size), self._some_layers(size, CHECK_STEP)
        chosen = Planner("auto", table).plan(shape.counts, shape.contexts)
        cuts = sorted({size * part // SCAN for part in range(1, SCAN)} - {0})
        plans = tuple(dict.fromkeys((chosen, SERIAL, FUSED, REORDERED, *(StepPlan("weave", cut) for cut in cuts))))
        result = self._run(shape, plans, CHECK_SECONDS, layers)
        seconds = {p: result.paired(i, 0) * self._scale(table.costs, shape, p, layers) for i, p in enumerate(plans)}
        best = min(seconds, key=lambda plan: seconds[plan])
        return Regret(size, chosen, seconds[chosen], best, seconds[best])

    def _shape(self, tokens: int) -> StepShape:
        return StepShape.prompts(tokens, self._context)

    def _run(self, shape: StepShape, plans: Sequence[StepPlan], seconds: float, layers: int) -> TrialResult:
        """A trial of as many rounds as fit into `seconds`, within ROUNDS."""
        step = self._per_token * shape.tokens * layers / self._layers
        rounds = int(seconds / (step * len(plans))) if step else 0
        rounds = min(max(rounds, self._rounds[0]), self._rounds[-1])
        some = None if layers == self._layers else layers
        return self._trials.run(Trial.of(shape, plans, rounds=rounds, layers=some))

    def _some_layers(self, tokens: int, seconds: float) -> int:
        """How many layers of a step of `tokens` to run: all, or as many as take about `seconds`, but 2 at least."""
        step = self._per_token * tokens
        return self._layers if step <= seconds else max(min(2, self._layers), round(self._layers * seconds / step))

    def _curve_point(self, size: int) -> TrialResult:
        self._report(f"stages and collectives of {size} tokens")
        layers = self._some_layers(size, CURVE_STEP)
        plans = (SERIAL, FUSED, REORDERED, NOCOMM, *self._budgeted)
        result = self._run(self._shape(size), plans, self._curve_seconds, layers)
        self._per_token = result.step(1) / size * self._layers / layers
        return result

    def _key_seconds(self) -> float:
        """Of attention, per key that a decoding token reads."""
        few = min(16, self._context)
        if self._context == few:
            return 0.0
        near, far = (
            self._run(StepShape.decode(1, keys), (FUSED,), CURVE_SECONDS, self._layers) for keys in (few, self._context)
        )
        return max(0.0, far.stage("attention") - near.stage("attention")) / (self._context - few)

    def _pair_seconds(self, results: dict[int, TrialResult], key_seconds: float) -> float:
        """Of attention, per query-key pair of a prompt: the largest size at the longest context against none."""
        size = max((size for size in results if 1 < size <= self._context // 2), default=0)
        if not size:
            return key_seconds
        cached = self._context - size
        layers = self._some_layers(size, CURVE_STEP)
        far = self._run(StepShape.prefill(size, cached), (FUSED,), CURVE_SECONDS, layers)
        return max(0.0, far.stage("attention") - results[size].stage("attention")) / (size * cached)

    def _head_curve(self) -> Curve:
        most = max(self.sizes)
        few = min(16, self._context)
        points = {}
        for rows in sorted({min(rows, most) for rows in HEAD_ROWS}):
            points[rows] = self._run(StepShape.decode(rows, few), (FUSED,), CURVE_SECONDS, min(1, self._layers)).head()
        return Curve.of(points)

    def _scale(self, costs: MeasuredCosts, shape: StepShape, plan: StepPlan, layers: int) -> float:
        """From a step of so many layers to one of all, as the simulator has it."""
        if layers == self._layers:
            return 1.0
        return simulate(costs, shape, plan).seconds / simulate(replace(costs, layers=layers), shape, plan).seconds
