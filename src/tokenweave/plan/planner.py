"""The front of the package: how the next step runs."""

from tokenweave.plan.step import MODES, StepPlan


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
