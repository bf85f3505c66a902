from dataclasses import replace

import numpy as np
import pytest

from tokenweave.engine.step import Step
from tokenweave.plan.step import StepPlan


def step(plan: StepPlan, *lengths: int) -> Step:
    arrays = [np.arange(n, dtype=np.int32) - 3 * i for i, n in enumerate(lengths)]
    return Step(plan, *arrays)


@pytest.mark.parametrize(
    "plan", [StepPlan("serial"), StepPlan("weave", 7), StepPlan("fused", 0, 4), StepPlan("weave", 9, 8, 0b10000001)]
)
@pytest.mark.parametrize("lengths", [(0,) * 12, (1,) * 12, (3, 3, 3, 577, 2, 0, 0, 13, 13, 13, 1, 1), (0,) * 11 + (5,)])
def test_arrives_as_sent(plan: StepPlan, lengths: tuple[int, ...]) -> None:
    sent = replace(step(plan, *lengths), best_only=plan.mode == "weave")
    got = Step.decode(sent.encode())
    assert got.plan == plan and got.best_only == sent.best_only
    for name in Step.__dataclass_fields__:
        if name not in ("plan", "best_only"):
            np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))


@pytest.mark.parametrize("change", [lambda m: m[:-4], lambda m: m + b"\0\0\0\0"])
def test_a_message_of_the_wrong_length_is_refused(change: object) -> None:
    message = step(StepPlan("fused"), *range(12)).encode()
    with pytest.raises(ValueError, match="words"):
        Step.decode(change(message))  # type: ignore[operator]
