"""What every benchmark prints and writes: an aligned table, a JSON file that says where it was measured, a plot."""

import argparse
import json
import os
import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write every figure to this file")
    parser.add_argument("--plot", metavar="FILE", help="draw the figures to this .png or .svg file")


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned: the first to the left, figures to the right."""
    cells = [list(headers), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
             for row in cells]  # fmt: skip
    return "\n".join(line.rstrip() for line in lines)


def machine() -> dict[str, Any]:
    """Where and with what the figures were taken."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return {
        "date": date.today().isoformat(),
        "processor": name,
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "tokenweave": version("tokenweave"),
    }


def write_json(path: str, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """A file of the rows, the machine, and whatever `more` is given by name."""
    Path(path).write_text(json.dumps({"machine": machine(), "rows": list(rows), **more}, indent=1) + "\n")


def check_plot(path: str) -> None:
    """Raise ValueError if no picture can be drawn to `path`: before the work, not after it."""
    if not path.endswith((".png", ".svg")):
        raise ValueError(f"--plot draws .png or .svg files, not {path}")
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")


def figure(width: float = 8.0, height: float = 4.5) -> Any:
    """matplotlib's (figure, axes), drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height), layout="constrained")
