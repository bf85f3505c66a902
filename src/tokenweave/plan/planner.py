"""The front of the package: how the next step runs."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from math import log2
from pathlib import Path

import numpy as np

from tokenweave.config import ModelConfig
from tokenweave.plan.analytical import AnalyticalCosts
from tokenweave.plan.choose import HIDES_NOTHING, choose
from tokenweave.plan.costs import Costs
from tokenweave.plan.hardware import Hardware
from tokenweave.plan.nearest import nearest_plan
from tokenweave.plan.scan import ALL_NARROW, FIRST_BUDGET
from tokenweave.plan.shape import StepShape
from tokenweave.plan.step import MODES, StepPlan
from tokenweave.plan.table import TunedTable, TuneKey, cache_directory, find

REMEMBERED = 4096
# Keys that cost a token's attention less than a tenth of what the rest of its layer costs, so that a context which
# grows from nothing to here needs one choice and not 36.
SMALL_CONTEXT = 256


def plan_step(mode: str, tokens: int) -> StepPlan:
    """The plan of a step of `tokens` tokens in a mode named by the user. Needs no costs: "auto" is "fused", and
    "weave" cuts in the middle.

    Raises ValueError on an unknown mode or a negative count.
    """
    if tokens < 0:
        raise ValueError(f"tokens must not be negative, got {tokens}")
    if mode != "auto" and mode not in MODES:
        raise ValueError(f"mode must be one of auto, {', '.join(MODES)}, got {mode!r}")
    if mode == "weave":
        return StepPlan(mode="weave", cut=tokens // 2)
    return StepPlan(mode="fused" if mode == "auto" else mode)


class Planner:
    """Plans step after step from costs.

    mode: "auto" takes what is predicted to be fastest; a mode of MODES is kept, and its cut and budget are chosen.
    costs: a tuned table, or any Costs. source: one line that says where they come from.
    """

    def __init__(self, mode: str, costs: TunedTable | Costs, source: str = "") -> None:
        plan_step(mode, 0)  # refuses an unknown mode
        self.mode, self.source = mode, source
        self._table = costs if isinstance(costs, TunedTable) else None
        self.costs: Costs = costs.costs if isinstance(costs, TunedTable) else costs
        self._known: OrderedDict[tuple[int, ...], StepPlan] = OrderedDict()

    @classmethod
    def open(
        cls, mode: str, config: ModelConfig, key: TuneKey, hardware: Hardware, *, directory: Path | None = None
    ) -> "Planner":
        """A planner for this machine: by the tuned table that holds for `key`; without one, by costs calculated for
        `hardware` on the link whose fingerprint the key carries.
        """
        table, source = find(key, directory or cache_directory())
        return cls.of(mode, config, key, hardware, table, source)

    @classmethod
    def of(
        cls, mode: str, config: ModelConfig, key: TuneKey, hardware: Hardware, table: TunedTable | None, source: str
    ) -> "Planner":
        """As `open`, with what `find` has found, perhaps in another process."""
        linked = hardware.with_link(latency=key.link_latency, bandwidth=key.link_bandwidth)
        calculated = AnalyticalCosts(config, linked, key.tensor_parallel_size, key.dtype)
        if table is None:
            return cls(mode, calculated, f"{source}; calculated for {hardware.name}")
        return cls(mode, replace(table, costs=replace(table.costs, squeeze=calculated)), source)

    def plan(self, counts: Sequence[int] | np.ndarray, contexts: Sequence[int] | np.ndarray) -> StepPlan:
        """The plan of a step of requests with `counts` new tokens each, whose last attend to `contexts` keys.

        A choice takes 0.2 to 6 ms, so steps that differ little share one: those whose tokens fill the same number of
        tiles (or differ by less than a sixteenth), whose attention work is within a fifth, and whose requests and
        border nearest to the middle are about the same. Finding one takes 2 µs, 4 for 256 decodes.
        """
        counts, contexts = np.asarray(counts), np.asarray(contexts)
        tokens = int(counts.sum())
        if not tokens or self.mode in ("serial", "reordered", "nocomm"):
            return plan_step(self.mode, tokens)
        like = self._like(counts, contexts, tokens)
        plan = self._known.get(like)
        if plan is None or (plan.cut >= tokens and plan.mode == "weave"):
            plan = self._known[like] = self._decide(StepShape(counts, contexts))
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(like)
        return plan

    def _like(self, counts: np.ndarray, contexts: np.ndarray, tokens: int) -> tuple[int, ...]:
        """What steps that share a plan have in common."""
        grain = self.costs.grain
        width = 1 << max(0, tokens.bit_length() - 5)  # a sixteenth to a thirty-second of the tokens
        width = min(width, grain) if grain > 1 else width
        size = (width, -(-tokens // width))
        if tokens == 1 or self.mode == "fused" or (self.mode == "auto" and self.costs.contention >= HIDES_NOTHING):
            return size  # not to be cut, and attention takes the same in all other modes
        rows = len(counts)
        keys = pairs = int(contexts.sum())
        nearest = tokens // 2
        if rows != tokens:  # not decodes only
            wide = counts.astype(np.int64)
            pairs = int(wide @ contexts - wide @ (wide - 1) // 2)
            ends = np.cumsum(counts)
            after = int(np.searchsorted(ends, nearest))
            around = [int(end) for end in ends[max(0, after - 1) : after + 1] if 0 < end < tokens]
            nearest = min(around, key=lambda border: abs(2 * border - tokens), default=0)
        work = (pairs + SMALL_CONTEXT * tokens, keys + SMALL_CONTEXT * rows, rows)
        return (*size, nearest // width, *(round(4 * log2(part)) for part in work))

    def _decide(self, shape: StepShape) -> StepPlan:
        if self._table is not None and self._table.key.threads == 0:  # a GPU
            plan = nearest_plan(self._table, shape, self.mode)
            if plan is not None:
                return plan
        corrections = self._table.corrections(shape.tokens) if self._table else None
        choice = choose(self.costs, shape, corrections)
        if self.mode == "auto":
            return _untried(choice.plan)
        return (
            _untried(choice.by_mode[self.mode][0])
            if self.mode in choice.by_mode
            else plan_step(self.mode, shape.tokens)
        )


def _untried(plan: StepPlan) -> StepPlan:
    """The plan; a woven one for a GPU with what a scan mostly ends at, which no simulation tells: at least FIRST_BUDGET
    thread blocks, and all matmuls counting on the other processors. The calculated plan of 1024 tokens of Llama-70B, on
    4, took 4 % longer than serial on an H200; on 8 and with those matmuls it is 1.3 times as fast.
    """
    if plan.mode != "weave" or plan.budget is None:
        return plan
    return replace(plan, budget=max(plan.budget, FIRST_BUDGET), narrow=ALL_NARROW)
