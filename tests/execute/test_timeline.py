"""Recorded steps: what is in them, what their figures mean, and that a delay moves its own bar and no other."""

from statistics import median

import pytest
from execute import timeline_ranks
from execute.timeline_ranks import DELAY, DELAYED

from tokenweave.comm import launch
from tokenweave.execute.timeline import Event, RecordedStep
from tokenweave.plan import StepPlan


def bars(steps: list[RecordedStep]) -> dict[tuple[str, int, str], float]:
    """Median seconds of each bar over the steps."""
    seconds: dict[tuple[str, int, str], list[float]] = {}
    for step in steps:
        for event in step.events:
            seconds.setdefault((event.stage, event.lane, event.kind), []).append(event.seconds)
    assert all(len(values) == len(steps) for values in seconds.values())
    return {bar: median(values) for bar, values in seconds.items()}


@pytest.mark.parametrize("collective", ["shared_memory", "distributed"])
def test_a_delay_moves_exactly_its_bar(collective: str) -> None:
    for found in launch(timeline_ranks.delayed, 2, collective):
        plain, late = bars(found["plain"]), bars(found["late"])
        assert plain.keys() == late.keys()
        assert len(plain) == 2 * 2 * timeline_ranks.STAGES
        for bar, seconds in late.items():
            moved = DELAY if bar == (*DELAYED, "communication") else 0.0
            assert abs(seconds - plain[bar] - moved) < 0.3 * DELAY, bar


def test_every_mode_is_recorded_in_order() -> None:
    for rank, steps in enumerate(launch(timeline_ranks.every_mode, 2)):
        for step in steps:
            assert step.rank == rank
            mode = step.plan.mode
            stages = ["embed"] + [f"layers.{i}.{s}" for i in range(3) for s in ("attention", "mlp")]
            computed = [(e.stage, e.lane) for e in step.events if e.kind == "compute" and not e.stage.endswith(".norm")]
            lanes = (0, 1) if mode == "weave" else (0,)
            assert computed == [(stage, lane) for stage in stages for lane in lanes]
            operations = {"nocomm": 0, "reordered": 2}.get(mode, 1)
            for lane in lanes:
                told = [e.stage for e in step.events if e.kind == "communication" and e.lane == lane]
                assert told == [stage for stage in stages for _ in range(operations)]
                own = [e for e in step.events if e.lane == lane]
                assert all(a.end <= b.begin for a, b in zip(own, own[1:], strict=False)), "one thing at a time"
            assert any(e.stage.endswith(".norm") for e in step.events) == (mode in ("serial", "reordered", "nocomm"))
            assert step.begin <= step.events[0].begin and max(e.end for e in step.events) <= step.end
            if mode != "weave":
                assert step.beside == 0
                assert step.exposed == pytest.approx(step.total("communication"))


def test_communication_is_beside_compute_or_exposed() -> None:
    """Compute 0 to 4, 5 to 9 and 12 to 13; communication 4 to 6 and 7 to 11."""
    events = [
        Event("a", 0, "compute", 0, 4), Event("a", 0, "communication", 4, 6), Event("a", 1, "compute", 5, 9),
        Event("a", 1, "communication", 7, 11), Event("b", 0, "compute", 12, 13),
    ]  # fmt: skip
    step = RecordedStep(StepPlan("weave", 1), 0, 0, 13, events)
    assert (step.total("compute"), step.total("communication")) == (9, 6)
    assert step.exposed == 3  # 4 to 5 and 9 to 11
    assert step.beside == 3
