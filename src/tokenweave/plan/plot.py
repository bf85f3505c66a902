"""The picture of a plan: time by mode, and the two lanes of one step."""

from pathlib import Path
from typing import Any

from tokenweave.plan.report import Question
from tokenweave.plan.shape import StepShape
from tokenweave.plan.simulate import schedule
from tokenweave.plan.step import StepPlan

COLOURS = {"compute": "#4878a8", "communication": "#e49444"}
SHOWN_LAYERS = 2


def draw(question: Question, found: dict[str, Any], path: str) -> None:
    """Write a .png or .svg file: each mode against serial over tokens, and the first layers of the largest step that
    can be cut, woven. Raises ValueError if matplotlib is not installed or the file's kind is unknown."""
    if Path(path).suffix not in (".png", ".svg"):
        raise ValueError(f"--plot writes .png or .svg files, got {path!r}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'tokenweave[plot]'") from None
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    modes, lanes = figure.subplots(1, 2)
    _draw_modes(modes, found)
    _draw_lanes(lanes, question, found)
    figure.savefig(path, dpi=150)


def _draw_modes(axes: Any, found: dict[str, Any]) -> None:
    steps = found["steps"]
    for mode in ("serial", "reordered", "fused", "weave", "nocomm"):
        points = [(s["tokens"], s["predicted_ms"][mode] / s["predicted_ms"]["serial"]) for s in steps
                  if mode in s["predicted_ms"]]  # fmt: skip
        style = {"linestyle": "--", "color": "grey"} if mode == "nocomm" else {"marker": "o"}
        axes.plot(*zip(*points, strict=True) if points else ([], []), label=mode, **style)
    axes.set(xscale="log", xlabel="tokens in the step", ylabel="time, serial = 1 (predicted)", ylim=(0, None))
    axes.set_title(f"{found['model']}, {found['tensor_parallel_size']} x {found['hardware']}")
    axes.legend()


def _draw_lanes(axes: Any, question: Question, found: dict[str, Any]) -> None:
    costs = question.costs
    woven = [step for step in found["steps"] if step["mode"] == "weave"]
    if not woven:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no step here is worth weaving", ha="center", transform=axes.transAxes)
        return
    step = max(woven, key=lambda row: row["tokens"])
    shape = StepShape.prefill(step["tokens"], step["context"])
    plan = StepPlan("weave", step["cut"], step["budget"])
    for bar in schedule(costs, shape, plan, min(SHOWN_LAYERS, costs.layers)):
        row = 2 * bar.lane + (bar.kind == "communication")
        axes.barh(row, (bar.end - bar.start) * 1e3, left=bar.start * 1e3, color=COLOURS[bar.kind], edgecolor="white")
    labels = ["A computes", "A communicates", "B computes", "B communicates"]
    axes.set_yticks(range(4), labels)
    axes.invert_yaxis()
    axes.set(xlabel="ms from the step's start (predicted)")
    axes.set_title(f"{step['cut']} + {step['tokens'] - step['cut']} tokens, first {SHOWN_LAYERS} layers")
