"""How a step runs: costs, a simulated schedule, and the choice between modes, cuts and budgets. No torch."""

from tokenweave.plan.planner import Planner, plan_step
from tokenweave.plan.step import MODES, StepPlan

__all__ = ["MODES", "Planner", "StepPlan", "plan_step"]
