"""bench layer's arithmetic, on steps whose times are known."""

import argparse
import json
import math
from pathlib import Path

import pytest
from fake_gpu import KEY, FakeTrials

from tokenweave.bench import layer
from tokenweave.cli.main import main
from tokenweave.execute.gpu_trials import LaneTimes, Sustained
from tokenweave.plan.gpu_tuning import GpuTuner
from tokenweave.plan.hardware import hardware
from tokenweave.plan.shape import StepShape
from tokenweave.plan.step import StepPlan
from tokenweave.plan.trial import Trial

PLAIN = (StepPlan("serial"), *(StepPlan("fused", budget=budget) for budget in layer.FUSED_BUDGETS))


class Runner:
    """A layer whose whole takes 30 and 50 µs, its lanes 20 + 15 and 30 + 25, and communication 22 and 10."""

    def lane_times(self, trial: object, layers: int) -> LaneTimes:
        if trial.plans[0].mode == "weave":  # type: ignore[attr-defined]
            return LaneTimes([20e-6, 15e-6], [30e-6, 25e-6], [22e-6, 10e-6])
        return LaneTimes([30e-6], [50e-6], [40e-6])


class Trials(FakeTrials):
    """A GPU that slows down by a fifth where it never waits."""

    runner = Runner()

    def sustained(self, trial: Trial) -> Sustained:
        seconds = float(self.run(trial).steps[0, 0])
        return Sustained(seconds, 1980, 500) if trial.plans[0].mode == "serial" else Sustained(1.2 * seconds, 1600, 690)


def test_a_layer_is_the_slope_and_the_losses_are_apart() -> None:
    plan = StepPlan("weave", 400, 6, 0b1111)
    row = layer.measured(Trials(), StepShape.prefill(1000), [StepPlan("weave", 500, 8), plan], rounds=3)
    base = 1e6 * (1e-5 + 1e-4)
    assert row["serial_us"] == pytest.approx(1.4 * base) and row["nocomm_us"] == pytest.approx(1.1 * base)
    assert row["weave_us"] == pytest.approx((1 - 4 * 0.004) * base)
    assert (row["cut"], row["budget"], row["narrow"]) == (400, 6, 0b1111)
    assert row["speedup"] == pytest.approx(1.4 / (1 - 4 * 0.004))
    assert row["split"] == pytest.approx(90 / 80)
    # A's attention beside B's reduction, B's beside A's, and so on
    assert row["overlap"] == pytest.approx(row["weave_us"] / (20 + 22 + 30 + 25))
    assert list(layer._shown(row).values())[-1] == "400 on 6, narrow 00001111"


def test_plans_of_a_tuned_file(tmp_path: Path) -> None:
    trials = Trials(share=0.375, budget=8)
    table = GpuTuner(trials, [256, 1024], layers=8, context=4096, hardware=hardware("h200")).tune(KEY)
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"table": table.to_json()}))
    args = argparse.Namespace(cut=None, tuned=str(path), budget=8)
    plans = layer._woven(trials, 1024, args)  # type: ignore[arg-type]
    assert StepPlan("weave", 384, 8, 0b1111) in plans and all(plan.mode == "weave" for plan in plans)
    auto = layer._auto(1000, args)
    assert auto is not None and auto.mode == "weave" and auto.cut == 384
    assert layer._auto(1000, argparse.Namespace(tuned=None)) is None


def test_what_auto_takes_against_the_better_of_serial_and_fused() -> None:
    """A cut far off the best one is slower than fused, and the bound says by how much."""
    shape, bad = StepShape.prefill(1000), StepPlan("weave", 64, 8)
    good = StepPlan("weave", 400, 6, 0b1111)
    bounds = {}
    for plan in (bad, good, StepPlan("serial")):
        row = layer.measured(Trials(), shape, [good], rounds=5, auto=plan)
        ran = (plan, *PLAIN)
        steps = dict(zip(ran, Trials().run(Trial.of(shape, ran, rounds=1, layers=8)).steps[:, 0], strict=True))
        better = min(steps[other] for other in PLAIN)
        bounds[plan] = row["auto_bound"]
        assert bounds[plan] == pytest.approx(steps[plan] / better) and row["auto"] == plan.mode
    assert bounds[good] < 1 < bounds[StepPlan("serial")]


def test_what_is_left_of_it_without_a_pause() -> None:
    trials, shape, plan = Trials(), StepShape.prefill(1000), StepPlan("weave", 400, 6, 0b1111)
    row = layer.measured(trials, shape, [StepPlan("weave", 500, 8), plan], rounds=3)
    row["sustained"] = layer.sustained(trials, shape, row, 0.05)
    ran = trials.asked[-len(row["sustained"]) :]
    assert [trial.plans[0] for trial in ran if trial.plans[0].mode == "weave"] == [plan]
    assert {trial.layers for trial in ran} == {layer.MANY}
    for trial in ran:
        step = layer.MANY * 1e-6 * row[f"{trial.plans[0].mode}_us"]
        assert len(trial.plans) == 1 and trial.rounds == max(10, math.ceil(0.05 / step))
    cells = {line[1]: line for line in layer._sustained_cells(row)}
    assert float(cells["weave"][3]) == pytest.approx(row["speedup"] / 1.2, abs=1e-3) and cells["serial"][3] == "1.000"
    assert cells["weave"][4:] == ["1600", "690"]


@pytest.mark.parametrize("tp, emulate_tp", [(2, None), (None, 8)])
def test_a_picture(tp: int | None, emulate_tp: int | None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [layer.measured(Trials(), StepShape.prefill(n), [], rounds=3) for n in (1024, 256)]
    args = argparse.Namespace(tp=tp, emulate_tp=emulate_tp, model="Llama-3.1-8B")
    layer._plot(str(tmp_path / "layer.svg"), rows, args)
    assert (tmp_path / "layer.svg").stat().st_size > 0


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layer", "--emulate-tp", "8", "--tokens", "0"]) == 2
    assert "--tokens must be at least 1" in capsys.readouterr().err
    assert main(["bench", "layer", "--emulate-tp", "8", "--sustained", "0"]) == 2
    assert "--sustained must be more than 0" in capsys.readouterr().err
