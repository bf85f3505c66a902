"""The best woven plan by trying: where matmuls run in waves, neighbouring cuts differ by a sixth, and no simulation of
a library's choices tells which is the good one. What runs the steps is handed in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tokenweave.plan.shape import StepShape
from tokenweave.plan.step import MATMULS, StepPlan
from tokenweave.plan.trial import Trial, Trials

GRAIN = 64  # tokens between two cuts: half of a tile of the largest matmul kernels
FEWEST = 128  # tokens of a lane
FIRST_BUDGET = 8  # beats 4 and 16 nearly everywhere on an H200
BUDGETS = (4, 6, 8, 12, 16)
FINALISTS, FINAL_ROUNDS = 4, 7
ALL_NARROW = (1 << 2 * len(MATMULS)) - 1


@dataclass(frozen=True)
class Effort:
    """cuts: of the first pass. kept: cuts whose budgets and neighbours are tried. narrowed: plans whose matmuls are.
    layers: of the steps that are run. rounds: of all but the last pass."""

    cuts: int
    kept: int
    narrowed: int
    layers: int
    rounds: int


# Beyond a few thousand tokens a step takes long, and has so many waves that neighbouring cuts differ little.
EFFORTS = {4096: Effort(32, 6, 3, 4, 3), 8192: Effort(32, 4, 2, 2, 3), 1 << 62: Effort(16, 3, 2, 2, 2)}


@dataclass(frozen=True)
class Scanned:
    """Plans with the seconds of a step of some layers, the fastest first."""

    plans: list[tuple[StepPlan, float]]

    @property
    def best(self) -> StepPlan:
        return self.plans[0][0]


class Scan:
    """Tries cuts, then budgets around the best cuts, then matmul by matmul who should count on fewer processors."""

    def __init__(self, trials: Trials, *, report: Callable[[str], None] = lambda what: None) -> None:
        self._trials, self._report = trials, report

    def best(self, shape: StepShape) -> Scanned:
        """Of a step of at least 2 * FEWEST tokens; of fewer, nothing."""
        found: dict[StepPlan, float] = {}
        effort = _effort(shape.tokens)
        cuts = _cuts(shape.tokens, effort.cuts)
        if not cuts:
            return Scanned([])
        self._report(f"{shape.tokens} tokens: {len(cuts)} cuts")
        first = [StepPlan("weave", cut, FIRST_BUDGET, narrow) for cut in cuts for narrow in (0, ALL_NARROW)]
        self._try(shape, first, found, effort.rounds)
        near = [
            replace(plan, cut=cut, budget=budget)
            for plan in _fastest(found, effort.kept)
            for cut, budget in (
                *((plan.cut + step, FIRST_BUDGET) for step in (-GRAIN, GRAIN)),
                *((plan.cut, budget) for budget in BUDGETS),
            )
            if FEWEST <= cut <= shape.tokens - FEWEST
        ]
        self._report(f"{shape.tokens} tokens: budgets")
        self._try(shape, near, found, effort.rounds)
        self._report(f"{shape.tokens} tokens: matmuls")
        for plan in _fastest(found, effort.narrowed):
            self._narrow(shape, plan, found)
        finalists = _fastest(found, FINALISTS)
        again: dict[StepPlan, float] = {}
        self._try(shape, finalists, again, FINAL_ROUNDS)
        return Scanned(sorted(again.items(), key=lambda pair: pair[1]))

    def every(self, shape: StepShape, budgets: Sequence[int] = (4, 6, 8, 16)) -> Scanned:
        """All cuts in steps of GRAIN, with each of these budgets."""
        found: dict[StepPlan, float] = {}
        effort, cuts = _effort(shape.tokens), range(GRAIN, shape.tokens, GRAIN)
        for budget in budgets:
            self._try(shape, [StepPlan("weave", cut, budget) for cut in cuts], found, effort.rounds)
        best = _fastest(found, 2 * FINALISTS)
        again: dict[StepPlan, float] = {}
        self._try(shape, best, again, FINAL_ROUNDS)
        return Scanned(sorted(again.items(), key=lambda pair: pair[1]))

    def _narrow(self, shape: StepShape, plan: StepPlan, found: dict[StepPlan, float]) -> None:
        """Each matmul changed by itself, then those that helped together."""
        effort = _effort(shape.tokens)
        bits = [1 << bit for bit in range(2 * len(MATMULS))]
        changed = {bit: replace(plan, narrow=plan.narrow ^ bit) for bit in bits}
        self._try(shape, [plan, *changed.values()], found, effort.rounds, again=True)
        gains = sorted((found[one] - found[plan], bit) for bit, one in changed.items())
        narrow, joined = plan.narrow, []
        for gain, bit in gains:
            if gain < 0:
                narrow ^= bit
                joined.append(replace(plan, narrow=narrow))
        self._try(shape, joined[1:], found, effort.rounds)

    def _try(
        self,
        shape: StepShape,
        plans: Sequence[StepPlan],
        found: dict[StepPlan, float],
        rounds: int,
        again: bool = False,
    ) -> None:
        new = [plan for plan in dict.fromkeys(plans) if again or plan not in found]
        if new:
            result = self._trials.run(
                Trial.of(shape, new, rounds=rounds, layers=_effort(shape.tokens).layers, parts=False)
            )
            found |= {plan: result.step(i) for i, plan in enumerate(new)}


def _fastest(found: dict[StepPlan, float], count: int) -> list[StepPlan]:
    return sorted(found, key=lambda plan: found[plan])[:count]


def _effort(tokens: int) -> Effort:
    return next(effort for most, effort in EFFORTS.items() if tokens <= most)


def _cuts(tokens: int, most: int) -> list[int]:
    """From a quarter to three quarters, evenly."""
    first, last = max(FEWEST, tokens // 4), min(tokens - FEWEST, tokens - tokens // 4)
    step = max(GRAIN, -(-(last - first) // (most * GRAIN)) * GRAIN)
    return [cut for cut in range(-(-first // GRAIN) * GRAIN, last + 1, step) if FEWEST <= cut <= tokens - FEWEST]
