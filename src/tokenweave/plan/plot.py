"""The picture of a plan: time by mode, and of one woven step its two lanes and what other cuts would take."""

from pathlib import Path
from typing import Any

from tokenweave.plan.report import Question
from tokenweave.plan.shape import StepShape
from tokenweave.plan.simulate import schedule, simulate
from tokenweave.plan.step import StepPlan

COLOURS = {"compute": "#4878a8", "communication": "#e49444"}
SHOWN_LAYERS = 2
MOST_CUTS = 64  # that are drawn


def draw(question: Question, found: dict[str, Any], path: str) -> None:
    """Write a .png or .svg file: each mode against serial over tokens; of the largest step that is worth weaving the
    first layers, and its time against where it is cut. Raises ValueError if matplotlib is not installed or the file's
    kind is unknown."""
    if Path(path).suffix not in (".png", ".svg"):
        raise ValueError(f"--plot writes .png or .svg files, got {path!r}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    modes, lanes, cuts = figure.subplots(1, 3)
    _draw_modes(modes, found)
    woven = [step for step in found["steps"] if step["mode"] == "weave"]
    if woven:
        step = max(woven, key=lambda row: row["tokens"])
        _draw_lanes(lanes, question, step)
        _draw_cuts(cuts, question, step)
    else:
        lanes.set_axis_off()
        cuts.set_axis_off()
        lanes.text(0.5, 0.5, "no step here is worth weaving", ha="center", transform=lanes.transAxes)
    figure.savefig(path, dpi=110)


def _draw_modes(axes: Any, found: dict[str, Any]) -> None:
    steps = found["steps"]
    for mode in ("serial", "reordered", "fused", "weave", "nocomm"):
        points = [(s["tokens"], s["predicted_ms"][mode] / s["predicted_ms"]["serial"]) for s in steps
                  if mode in s["predicted_ms"]]  # fmt: skip
        style = {"linestyle": "--", "color": "grey"} if mode == "nocomm" else {"marker": "o"}
        axes.plot(*zip(*points, strict=True) if points else ([], []), label=mode, **style)
    axes.set(xscale="log", xlabel="tokens in the step", ylabel="time, serial = 1 (predicted)", ylim=(0, None))
    axes.set_xticks([s["tokens"] for s in steps], [f"{s['tokens']}" for s in steps])
    axes.minorticks_off()
    axes.set_title(f"{found['model']}, {found['tensor_parallel_size']} x {found['hardware']}")
    axes.legend()


def _draw_lanes(axes: Any, question: Question, step: dict[str, Any]) -> None:
    costs, shape = question.costs, StepShape.prefill(step["tokens"], step["context"])
    plan = StepPlan("weave", step["cut"], step["budget"])
    for bar in schedule(costs, shape, plan, min(SHOWN_LAYERS, costs.layers)):
        row = 2 * bar.lane + (bar.kind == "communication")
        axes.barh(row, (bar.end - bar.start) * 1e3, left=bar.start * 1e3, color=COLOURS[bar.kind], edgecolor="white")
    labels = ["A computes", "A communicates", "B computes", "B communicates"]
    axes.set_yticks(range(4), labels)
    axes.invert_yaxis()
    axes.set(xlabel="ms from the step's start (predicted)")
    axes.set_title(f"{step['cut']} + {step['tokens'] - step['cut']} tokens, first {SHOWN_LAYERS} layers")


def _draw_cuts(axes: Any, question: Question, step: dict[str, Any]) -> None:
    """Half a tile apart, so that the waves show: between whole tiles a lane computes rows that it does not have."""
    costs, shape = question.costs, StepShape.prefill(step["tokens"], step["context"])
    tokens, half = shape.tokens, max(1, costs.grain // 2)
    apart = half * max(1, tokens // 2 // MOST_CUTS // half)
    cuts = sorted({*range(-(-tokens // 4 // apart) * apart, 3 * tokens // 4 + 1, apart), step["cut"]})
    for budget in costs.budgets:
        times = [1e3 * simulate(costs, shape, StepPlan("weave", cut, budget)).seconds for cut in cuts]
        if min(times) < step["predicted_ms"]["fused"]:
            axes.plot(cuts, times, marker=".", lw=1, label=f"{budget} SMs communicate")
    axes.plot(step["cut"], step["predicted_ms"]["weave"], "k*", ms=12, label="chosen")
    axes.axhline(step["predicted_ms"]["fused"], color="grey", ls="--", label="fused")
    axes.set(xlabel="tokens in lane A", ylabel="ms (predicted)")
    axes.set_title(f"{tokens} tokens by where they are cut")
    axes.margins(y=0.3)
    axes.legend(fontsize="small", ncols=2)
