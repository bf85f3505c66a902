"""The loss curve as a picture."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def check(path: Path) -> None:
    """Raise ValueError if no picture can be drawn to `path`: before a run that takes hours, not after it."""
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"--plot draws .png or .svg files, not {path.name}")
    if find_spec("matplotlib") is None:
        raise ValueError("a loss plot needs matplotlib: pip install matplotlib")


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """rows: of OUT/losses.jsonl."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    fig, axes = pyplot.subplots(figsize=(8.0, 4.5), layout="constrained")
    axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], lw=0.8, label="training")
    scored = [row for row in rows if row["held_out"] is not None]
    axes.plot([row["step"] for row in scored], [row["held_out"] for row in scored], marker="o", label="held out")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a token")
    axes.legend()
    fig.savefig(path)
    pyplot.close(fig)
