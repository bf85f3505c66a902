"""Recorded steps as a Chrome trace, a picture and a table. Steps come as [plan][rank]."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenweave.bench import output
from tokenweave.execute.timeline import RecordedStep

COLOURS = {"compute": "#4c72b0", "communication": "#dd8452"}
SHOWN_LAYERS = 3  # in the picture: bars of more are too narrow to read
LANES = "AB"


def title(step: RecordedStep) -> str:
    return f"weave, cut at {step.plan.cut}" if step.plan.mode == "weave" else step.plan.mode


@dataclass(frozen=True)
class Figures:
    """Seconds of a recorded step. slower: what compute takes longer than in the fused step of the same trace, for the
    cut and for what communication beside it takes from the core. hidden: communication that costs no time, that beside
    compute less `slower`."""

    step: float
    compute: float
    communication: float
    exposed: float
    slower: float

    @property
    def hidden(self) -> float:
        return self.communication - self.exposed - self.slower


def figures_of(step: RecordedStep, fused: RecordedStep | None) -> Figures:
    """fused: the same rank's fused step, needed of a woven one."""
    compute = step.total("compute")
    slower = compute - fused.total("compute") if step.plan.mode == "weave" and fused else 0.0
    return Figures(step.seconds, compute, step.total("communication"), step.exposed, slower)


def table(steps: Sequence[Sequence[RecordedStep]], fused: Sequence[RecordedStep] | None) -> str:
    """In ms. fused: every rank's fused step."""
    rows = []
    for ranks in steps:
        for step in ranks:
            own = figures_of(step, fused[step.rank] if fused else None)
            values = (own.step, own.compute, own.communication, own.exposed, own.slower, own.hidden)
            rows.append([title(step), str(step.rank), *(f"{1e3 * value:.1f}" for value in values)])
    headers = ["ms", "rank", "step", "compute", "communication", "exposed", "slower compute", "hidden"]
    return "\n".join([output.table(headers, rows), *_shares(steps, fused)])


def _shares(steps: Sequence[Sequence[RecordedStep]], fused: Sequence[RecordedStep] | None) -> list[str]:
    """How much of the communication is hidden, by the woven step's events and by what it saves, of all ranks."""
    woven = next((ranks for ranks in steps if ranks[0].plan.mode == "weave"), None)
    if woven is None or fused is None or not any(step.total("communication") for step in fused):
        return []
    own = [figures_of(step, fused[step.rank]) for step in woven]
    share = sum(f.hidden for f in own) / sum(f.communication for f in own)
    saved = sum(f.seconds - f_woven.step for f, f_woven in zip(fused, own, strict=True))
    part = saved / sum(step.total("communication") for step in fused)
    told = f"{1e3 * abs(saved) / len(own):.1f} ms {'less' if saved >= 0 else 'more'} than fused"
    return [
        f"weave hides {share:.1%} of its communication; a step takes {told}, {abs(part):.1%} of what fused communicates"
    ]


def write_chrome(path: str, steps: Sequence[Sequence[RecordedStep]]) -> None:
    """Trace Event Format: a process for each plan and rank, a thread for each lane; all steps begin at 0."""
    events: list[dict[str, Any]] = []
    for index, ranks in enumerate(steps):
        first = min(step.begin for step in ranks)
        for step in ranks:
            pid = 100 * index + step.rank
            events.append(_named("process_name", pid, 0, f"{title(step)} · rank {step.rank}"))
            for lane in sorted({event.lane for event in step.events}):
                events.append(_named("thread_name", pid, lane, f"lane {LANES[lane]}"))
            events += [
                {
                    "name": event.stage, "cat": event.kind, "ph": "X", "pid": pid, "tid": event.lane,
                    "ts": 1e6 * (event.begin - first), "dur": 1e6 * event.seconds,
                    "args": {"kind": event.kind},
                }
                for event in step.events
            ]  # fmt: skip
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n", encoding="utf-8")


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def picture(
    path: str, steps: Sequence[Sequence[RecordedStep]], fused: Sequence[RecordedStep] | None, *, layers: int
) -> None:
    """Lanes over time: a panel for each plan, all on one scale, showing the layers in the middle of the model."""
    first = max(0, (layers - SHOWN_LAYERS) // 2)
    names = [f"layers.{layer}." for layer in range(first, min(layers, first + SHOWN_LAYERS))]
    heights = [len(_rows(ranks)) + 1.2 for ranks in steps]
    fig, axes = output.figure(width=11.0, height=0.36 * sum(heights) + 0.9)
    axes.remove()
    grid = fig.add_gridspec(len(steps), 1, height_ratios=heights)
    panels = [fig.add_subplot(grid[index, 0]) for index in range(len(steps))]
    widest = max(_panel(panel, ranks, fused, names) for panel, ranks in zip(panels, steps, strict=True))
    for panel in panels:
        panel.set_xlim(0, widest)
    panels[-1].set_xlabel(f"ms, of {len(names)} layers in the middle of {layers}")
    handles = [panels[0].barh(-9, 0, color=colour, label=kind) for kind, colour in COLOURS.items()]
    fig.legend(handles=handles, loc="outside upper right", ncols=2, frameon=False)
    fig.savefig(path, dpi=130)


def _rows(ranks: Sequence[RecordedStep]) -> list[tuple[int, int]]:
    """(rank, lane) from top to bottom."""
    return [(step.rank, lane) for step in ranks for lane in sorted({event.lane for event in step.events})]


def _panel(
    panel: Any, ranks: Sequence[RecordedStep], fused: Sequence[RecordedStep] | None, names: Sequence[str]
) -> float:
    """Draw one plan's steps; returns how many ms it shows."""
    rows = _rows(ranks)
    shown = [e for step in ranks for e in step.events if e.stage.startswith(tuple(names))]
    start, stop = min(e.begin for e in shown), max(e.end for e in shown)
    for step in ranks:
        for event in step.events:
            if event.end <= start or event.begin >= stop:
                continue
            y, left = rows.index((step.rank, event.lane)), 1e3 * (event.begin - start)
            own = event.stage.startswith(tuple(names))
            panel.barh(y, 1e3 * event.seconds, left=left, height=0.8, color=COLOURS[event.kind],
                       edgecolor="white", linewidth=0.4, alpha=1.0 if own else 0.3)  # fmt: skip
            if own and event.kind == "compute" and 1e3 * event.seconds > 0.06 * 1e3 * (stop - start):
                panel.text(left + 5e2 * event.seconds, y, event.stage.split(".")[-1], ha="center", va="center",
                           color="white", fontsize=7)  # fmt: skip
    panel.set_ylim(len(rows) - 0.5, -0.5)
    many = len({lane for _, lane in rows}) > 1
    panel.set_yticks(range(len(rows)), [f"rank {r}" + (f" {LANES[lane]}" if many else "") for r, lane in rows])
    slowest = max(ranks, key=lambda step: step.total("compute"))
    found = figures_of(slowest, fused[slowest.rank] if fused else None)
    parts = {"communication": found.communication, "hidden": found.hidden, "exposed": found.exposed}
    if slowest.plan.mode == "weave":
        parts["slower compute"] = found.slower
    told = ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in parts.items())
    words = f"{title(slowest)}: step {1e3 * found.step:.0f} ms; {told}"
    panel.set_title(words, loc="left", fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)
    return 1e3 * (stop - start)
