"""The loss curve as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """rows: of OUT/losses.jsonl. Raises ValueError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("a loss plot needs matplotlib: pip install 'tokenweave[plot]'") from None
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
