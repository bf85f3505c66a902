"""Recorded steps as a Chrome trace, a picture and a table. Steps come as [plan][rank]."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenweave.bench import output
from tokenweave.execute.timeline import RecordedStep

COLOURS = {"compute": "#4c72b0", "communication": "#dd8452"}
SHOWN_LAYERS = 3  # in the picture: bars of more are too narrow to read
LANES = "AB"


def title(step: RecordedStep) -> str:
    return f"weave, cut at {step.plan.cut}" if step.plan.mode == "weave" else step.plan.mode


def figures(steps: Sequence[Sequence[RecordedStep]]) -> str:
    """A table in ms: communication is hidden or exposed, or took the time from the compute beside it."""
    rows = [
        [title(step), str(step.rank), *(f"{1e3 * value:.1f}" for value in (
            step.seconds, step.total("compute"), step.total("communication"), step.hidden, step.exposed, step.taken,
        ))]
        for ranks in steps for step in ranks
    ]  # fmt: skip
    headers = ["ms", "rank", "step", "compute", "communication", "hidden", "exposed", "from compute"]
    return "\n".join([output.table(headers, rows), *_shares(steps)])


def _shares(steps: Sequence[Sequence[RecordedStep]]) -> list[str]:
    """How much of the communication is hidden, by the woven step's events and by what it saves."""
    by_mode = {ranks[0].plan.mode: ranks for ranks in steps}
    if not {"fused", "weave"} <= by_mode.keys():
        return []
    fused, woven = by_mode["fused"], by_mode["weave"]
    events = _sum(woven, "hidden") / max(_communication(woven), 1e-9)
    saved = (_sum(fused, "seconds") - _sum(woven, "seconds")) / max(_communication(fused), 1e-9)
    return [f"hidden, by its events: {events:.1%} of communication; fused - weave: {saved:.1%} of that in fused"]


def _sum(ranks: Sequence[RecordedStep], what: str) -> float:
    return sum(getattr(step, what) for step in ranks)


def _communication(ranks: Sequence[RecordedStep]) -> float:
    return sum(step.total("communication") for step in ranks)


def write_chrome(path: str, steps: Sequence[Sequence[RecordedStep]]) -> None:
    """Trace Event Format: a process for each plan and rank, a thread for each lane; all steps begin at 0."""
    events: list[dict[str, Any]] = []
    for index, ranks in enumerate(steps):
        for step in ranks:
            pid = 100 * index + step.rank
            events.append(_named("process_name", pid, 0, f"{title(step)} · rank {step.rank}"))
            for lane in sorted({event.lane for event in step.events}):
                events.append(_named("thread_name", pid, lane, f"lane {LANES[lane]}"))
            events += [
                {
                    "name": event.stage, "cat": event.kind, "ph": "X", "pid": pid, "tid": event.lane,
                    "ts": 1e6 * (event.begin - ranks[0].begin), "dur": 1e6 * event.seconds,
                    "args": {"kind": event.kind},
                }
                for event in step.events
            ]  # fmt: skip
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n", encoding="utf-8")


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def picture(path: str, steps: Sequence[Sequence[RecordedStep]], *, layers: int) -> None:
    """Lanes over time: a panel for each plan, all on one scale, showing the layers in the middle of the model."""
    first = max(0, (layers - SHOWN_LAYERS) // 2)
    names = [f"layers.{layer}." for layer in range(first, min(layers, first + SHOWN_LAYERS))]
    heights = [len(_rows(ranks)) + 1.2 for ranks in steps]
    fig, axes = output.figure(width=11.0, height=0.36 * sum(heights) + 0.9)
    axes.remove()
    grid = fig.add_gridspec(len(steps), 1, height_ratios=heights)
    panels = [fig.add_subplot(grid[index, 0]) for index in range(len(steps))]
    widest = max(_panel(panel, ranks, names) for panel, ranks in zip(panels, steps, strict=True))
    for panel in panels:
        panel.set_xlim(0, widest)
    panels[-1].set_xlabel(f"ms, of {len(names)} layers in the middle of {layers}")
    handles = [panels[0].barh(-9, 0, color=colour, label=kind) for kind, colour in COLOURS.items()]
    fig.legend(handles=handles, loc="outside upper right", ncols=2, frameon=False)
    fig.savefig(path, dpi=130)


def _rows(ranks: Sequence[RecordedStep]) -> list[tuple[int, int]]:
    """(rank, lane) from top to bottom."""
    return [(step.rank, lane) for step in ranks for lane in sorted({event.lane for event in step.events})]


def _panel(panel: Any, ranks: Sequence[RecordedStep], names: Sequence[str]) -> float:
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
    ms = [f"{1e3 * t:.0f}" for t in (slowest.seconds, slowest.total("communication"), slowest.hidden, slowest.exposed)]
    words = f"{title(slowest)}: step {ms[0]} ms; communication {ms[1]}, hidden {ms[2]}, exposed {ms[3]}"
    panel.set_title(words, loc="left", fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)
    return 1e3 * (stop - start)
