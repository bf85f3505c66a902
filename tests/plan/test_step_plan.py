import pytest

from tokenweave.plan.step import MATMULS, StepPlan


def test_narrow_matmuls_by_lane() -> None:
    plan = StepPlan("weave", 5, 8, narrow=0b1000_0101)
    assert plan.narrow_matmuls(0) == ["qkv", "gate_up"] and plan.narrow_matmuls(1) == ["down"]
    assert StepPlan("weave", 5).narrow_matmuls(0) == []
    assert StepPlan("weave", 5, 8, 0xFF).narrow_matmuls(1) == list(MATMULS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fast",), "mode must be one of"),
        (("weave", -1), "cut must not be negative"),
        (("weave", 1, 8, 256), "narrow"),
        (("weave", 1, 8, -1), "narrow"),
        (("weave", 1, None, 3), "narrow"),
    ],
)
def test_refuses(arguments: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StepPlan(*arguments)
