"""A step's time in a mode, from its costs: the two-lane schedule, run on paper."""

from collections.abc import Iterator
from dataclasses import dataclass

from tokenweave.plan.costs import LAYER, Costs
from tokenweave.plan.shape import Load, StepShape
from tokenweave.plan.step import StepPlan


@dataclass(frozen=True)
class Prediction:
    """Seconds of one step. `compute` is work that no collective slows, and includes norms and the head; `contention`
    what collectives running beside it add. The compute stream waits for `exposed` of the `communication`.
    """

    seconds: float
    compute: float
    communication: float
    contention: float = 0.0

    @property
    def exposed(self) -> float:
        return max(0.0, self.seconds - self.compute - self.contention)

    @property
    def hidden(self) -> float:
        return max(0.0, self.communication - self.exposed)


@dataclass(frozen=True)
class Bar:
    """One piece of work of the simulated schedule, in seconds from the step's start."""

    lane: int
    name: str
    kind: str  # "compute" or "communication"
    start: float
    end: float


def simulate(costs: Costs, shape: StepShape, plan: StepPlan) -> Prediction:
    """Seconds that a step of this shape takes under `plan`. Raises ValueError if the cut is beyond the step."""
    if plan.mode != "weave":
        return _one_lane(costs, shape.load(), plan)
    first, second = shape.loads(plan.cut)
    if not first.tokens or not second.tokens:  # an empty lane has nothing to hide behind
        return _one_lane(costs, shape.load(), StepPlan("fused", budget=plan.budget))
    lanes = _TwoLanes(costs, (first, second), plan.budget)
    lanes.stage("embed")
    previous: tuple[float, ...] = ()
    for done in range(1, costs.layers + 1):
        before = lanes.state()
        for stage in LAYER:
            lanes.stage(stage)
        change = tuple(b - a for a, b in zip(before, lanes.state(), strict=True))
        # Every layer costs the same, so the schedule becomes periodic, mostly after two layers of eighty.
        if previous and all(abs(a - b) <= 1e-9 * abs(b) + 1e-15 for a, b in zip(previous, change, strict=True)):
            lanes.skip(change, costs.layers - done)
            break
        previous = change
    return lanes.prediction(costs.head(shape.load().rows))


def schedule(costs: Costs, shape: StepShape, plan: StepPlan, layers: int) -> Iterator[Bar]:
    """The bars of a woven step's first `layers` layers, for pictures."""
    lanes = _TwoLanes(costs, shape.loads(plan.cut), plan.budget)
    for stage in ("embed", *LAYER * layers):
        for lane, start, end in lanes.stage(stage):
            reduced = lanes.ready[lane]
            yield Bar(lane, stage, "compute", start, end)
            yield Bar(lane, stage, "communication", reduced - lanes.reductions[lane], reduced)


def _one_lane(costs: Costs, load: Load, plan: StepPlan) -> Prediction:
    """One stage after the other, and a reduction with the norm after each."""
    tokens = load.tokens
    if not tokens:
        return Prediction(0.0, 0.0, 0.0)
    stages = 1 + len(LAYER) * costs.layers
    compute = costs.compute("embed", load) + costs.layers * sum(costs.compute(stage, load) for stage in LAYER)
    compute += costs.head(load.rows)
    if plan.mode in ("serial", "nocomm"):
        compute += stages * costs.norm(tokens)
    communication = (
        stages
        * {
            "serial": lambda: costs.all_reduce(tokens),
            "nocomm": lambda: 0.0,
            "reordered": lambda: costs.reordered(tokens),
            "fused": lambda: costs.fused(tokens, plan.budget),
        }[plan.mode]()
    )
    return Prediction(compute + communication, compute, communication)


class _TwoLanes:
    """Clocks of the compute stream and the communication stream.

    The compute stream runs A0 B0 A1 B1 ...; each stage waits for its own lane's last reduction and nothing else. The
    reductions run in the same order on the communication stream.

    A stage that starts while the other lane's collective runs is slowed by the waves its matmuls lose on the remaining
    processors, and by `contention` of its time at least (memory, caches, power): for the whole stage, because its
    thread blocks were dealt out while the processors were taken. It never loses more than the time that the collective
    runs beside it: then the processors are back. So a woven step takes no longer than all compute plus all
    communication, and no less than either.
    """

    def __init__(self, costs: Costs, loads: tuple[Load, Load], budget: int | None) -> None:
        self.reductions = [costs.fused(load.tokens, budget) if load.tokens else 0.0 for load in loads]
        self.alone = {s: [costs.compute(s, load) for load in loads] for s in ("embed", *LAYER)}
        self.loss = {
            stage: [
                max(costs.contention * alone, costs.compute(stage, load, budget or 0) - alone)
                for alone, load in zip(times, loads, strict=True)
            ]
            for stage, times in self.alone.items()
        }
        self.now = self.link_free = 0.0
        self.ready = [0.0, 0.0]
        self.compute = self.communication = self.contention = 0.0

    def stage(self, name: str) -> list[tuple[int, float, float]]:
        """Run one stage of both lanes; returns (lane, start, end) of its compute."""
        ran = []
        for lane in (0, 1):
            alone = self.alone[name][lane]
            start = max(self.now, self.ready[lane])
            beside = max(0.0, self.link_free - start)
            lost = min(self.loss[name][lane], beside)
            self.now = start + alone + lost
            self.link_free = self.ready[lane] = max(self.now, self.link_free) + self.reductions[lane]
            self.compute += alone
            self.contention += lost
            self.communication += self.reductions[lane]
            ran.append((lane, start, self.now))
        return ran

    def state(self) -> tuple[float, ...]:
        return (self.now, self.link_free, *self.ready, self.compute, self.communication, self.contention)

    def skip(self, change: tuple[float, ...], times: int) -> None:
        """As if `times` more layers had each brought `change`."""
        now, link, first, second, compute, communication, contention = (
            value + times * step for value, step in zip(self.state(), change, strict=True)
        )
        self.now, self.link_free, self.ready = now, link, [first, second]
        self.compute, self.communication, self.contention = compute, communication, contention

    def prediction(self, head: float) -> Prediction:
        seconds = max(self.now, self.link_free) + head
        return Prediction(seconds, self.compute + head, self.communication, self.contention)
