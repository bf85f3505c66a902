"""Which mode, cut and budget a step gets: the candidates, and the one that is predicted to be fastest."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tokenweave.plan.costs import LAYER, Costs
from tokenweave.plan.shape import StepShape
from tokenweave.plan.simulate import Prediction, simulate
from tokenweave.plan.step import MODES, StepPlan

# A step is woven, or reordered, only where that promises to win more than the simulator errs by: 1 to 1.5 % on the
# mean of published figures it had not seen.
MARGIN = 0.02
TIE = 0.01  # two measurements of one plan differ by as much: fused is taken unless serial wins more
MOST_BORDERS = 2
# A stage that loses ten times its own time beside a collective computes while that runs as good as nothing: such steps
# are not woven, whatever a prediction of them or a noisy measurement says.
HIDES_NOTHING = 10.0


@dataclass(frozen=True)
class Choice:
    """The chosen plan, why, and what each mode would take: the best plan of each mode and its prediction."""

    plan: StepPlan
    reason: str
    by_mode: Mapping[str, tuple[StepPlan, Prediction]]

    @property
    def prediction(self) -> Prediction:
        return self.by_mode[self.plan.mode][1]


def cuts(shape: StepShape, grain: int) -> list[int]:
    """Where the step may be cut: near the middle on whole tiles, so that no matmul gets one more half-empty one, and
    on the borders of requests nearest to the middle. Fewer than two tokens cannot be cut.
    """
    tokens = shape.tokens
    middle = tokens // 2
    near = {middle}
    for eighths in (3, 4, 5):
        down = tokens * eighths // 8 // grain * grain
        near |= {down, down + grain, tokens - down, tokens - down - grain}
    borders = sorted(shape.borders(), key=lambda border: abs(border - middle))[:MOST_BORDERS]
    inside = [cut for cut in near if 3 * tokens <= 8 * cut <= 5 * tokens or abs(cut - middle) <= grain]
    return sorted({cut for cut in (*inside, *borders) if 0 < cut < tokens})


def choose(costs: Costs, shape: StepShape, corrections: Mapping[str, float] | None = None) -> Choice:
    """The plan with the least predicted time. Both lanes are costed at their own sizes.

    corrections: measured over simulated time by mode, from a tuned table.
    """
    factors = corrections or dict.fromkeys(MODES, 1.0)
    by_mode = {mode: _best(costs, shape, plans) for mode, plans in _candidates(costs, shape).items()}
    times = {mode: found[1].seconds * factors[mode] for mode, found in by_mode.items() if mode != "nocomm"}
    plain = "fused" if (1 - TIE) * times["fused"] <= times["serial"] else "serial"
    best = min(times, key=lambda mode: times[mode])
    mode = best if times[best] < (1 - MARGIN) * times[plain] else plain
    return Choice(by_mode[mode][0], _reason(costs, shape, mode, by_mode), by_mode)


def ranked(costs: Costs, shape: StepShape) -> list[tuple[StepPlan, Prediction]]:
    """Every candidate that gives right results, the one that is predicted to be fastest first."""
    plans = [plan for mode, found in _candidates(costs, shape).items() if mode != "nocomm" for plan in found]
    return sorted(((plan, simulate(costs, shape, plan)) for plan in plans), key=lambda pair: pair[1].seconds)


def _candidates(costs: Costs, shape: StepShape) -> dict[str, Iterable[StepPlan]]:
    found: dict[str, Iterable[StepPlan]] = {mode: [StepPlan(mode)] for mode in ("serial", "reordered", "nocomm")}
    found["fused"] = [StepPlan("fused", budget=budget) for budget in costs.budgets]
    where = cuts(shape, costs.grain) if costs.contention < HIDES_NOTHING else []
    woven = [StepPlan("weave", cut, budget) for cut in where for budget in costs.budgets]
    return found | ({"weave": woven} if woven else {})


def _best(costs: Costs, shape: StepShape, plans: Iterable[StepPlan]) -> tuple[StepPlan, Prediction]:
    simulated = [(plan, simulate(costs, shape, plan)) for plan in plans]
    return min(simulated, key=lambda pair: pair[1].seconds)


def _reason(costs: Costs, shape: StepShape, mode: str, by_mode: Mapping[str, tuple[StepPlan, Prediction]]) -> str:
    """One line for people."""
    fused = by_mode["fused"][1]
    if costs.contention >= HIDES_NOTHING:
        return f"{mode}: cores that compute cannot communicate meanwhile"
    if "weave" not in by_mode:
        return f"{mode}: too few tokens to cut"
    plan, woven = by_mode["weave"]
    cost = max(0.0, woven.compute - fused.compute)
    if mode == "weave":
        return (
            f"weave: hides {_ms(woven.hidden)} of {_ms(woven.communication)} of communication; the cut costs "
            f"{_ms(cost)} of compute and running beside it {_ms(woven.contention)}"
        )
    if not fused.communication:
        return f"{mode}: there is nothing to communicate"
    first, second = shape.loads(plan.cut)
    if cost > woven.hidden:
        return (
            f"{mode}: lanes of {first.tokens} and {second.tokens} tokens compute {_ms(woven.compute)} where one "
            f"computes {_ms(fused.compute)}{_weights(costs, shape)}, more than the {_ms(woven.hidden)} of "
            f"communication they hide"
        )
    return (
        f"{mode}: weaving would hide {_ms(woven.hidden)}, and cost {_ms(cost)} of compute for the cut and "
        f"{_ms(woven.contention)} for running beside it"
    )


def _weights(costs: Costs, shape: StepShape) -> str:
    """Whether what a stage costs at any number of tokens, reading its weights, is what the second lane pays again."""
    load = shape.load()
    half = shape.loads(load.tokens // 2)[0]
    whole = sum(costs.compute(stage, load) for stage in LAYER)
    return " (each lane reads the weights again)" if sum(costs.compute(s, half) for s in LAYER) > 0.6 * whole else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
