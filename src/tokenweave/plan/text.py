"""What `tokenweave plan` says, for people."""

from collections.abc import Sequence
from typing import Any

from tokenweave.plan.report import NORM_PASSES
from tokenweave.plan.step import MODES


def text(found: dict[str, Any]) -> str:
    """The rows of `plan.report.report` as aligned tables and sentences."""
    size = found["tensor_parallel_size"]
    blocks = [f"{found['model']} on {size} x {found['hardware']}, {found['dtype']} (predicted)"]
    blocks.append(_steps_text(found["steps"]))
    blocks.append(_modes_text(found["steps"]))
    blocks.append(_waves_text(found["steps"]))
    if "pipeline" in found:
        blocks.append(_pipeline_text(found["pipeline"], size))
    blocks.append(_memory_text(found))
    blocks.append(_balance_text(found["balance"]))
    if found["notes"]:
        blocks.append("Notes\n" + "\n".join(f"- {note}" for note in found["notes"]))
    return "\n\n".join(blocks)


def _steps_text(steps: Sequence[dict[str, Any]]) -> str:
    names = list(steps[0]["serial_ms"])
    rows = [
        [f"{row['tokens']}"]
        + [f"{row['serial_ms'][n]:.2f} ({row['serial_share'][n]:.0%})" for n in names]
        + [f"{row['norm_rows_per_rank']['serial']} -> {row['norm_rows_per_rank']['fused']}"]
        for row in steps
    ]
    passes = f"{NORM_PASSES['serial']} -> {NORM_PASSES['fused']}"
    return (
        "Where a serial step's time goes, ms (share); rows a rank norms, serial -> fused\n"
        + _table(["tokens", *names, "norm rows"], rows)
        + f"\nMemory passes per row between two stages: {passes}."
    )


def _modes_text(steps: Sequence[dict[str, Any]]) -> str:
    rows = []
    for row in steps:
        times = [f"{row['predicted_ms'][m]:.2f}" if m in row["predicted_ms"] else "-" for m in MODES]
        budget = "-" if row["budget"] is None else str(row["budget"])
        cut = f"{row['cut']}+{row['tokens'] - row['cut']}" if row["cut"] else "-"
        rows.append([f"{row['tokens']}", *times, row["mode"], cut, budget])
    reasons = "\n".join(f"  {row['tokens']}: {row['reason']}" for row in steps)
    headers = ["tokens", *MODES, "chosen", "cut", "budget"]
    return f"Predicted step, ms; budget in SMs\n{_table(headers, rows)}\n{reasons}"


def _waves_text(steps: Sequence[dict[str, Any]]) -> str:
    names = [wave["matmul"] for wave in steps[0]["waves"]]
    rows = []
    for row in steps:
        cells = [" + ".join(_wave_text(lane) for lane in w["lanes"]) or "-" for w in row["waves"]]
        whole = [_wave_text(w["whole"]) for w in row["waves"]]
        rows.append([f"{row['tokens']}"] + [f"{w} | {c}" for w, c in zip(whole, cells, strict=True)])
    return "Waves per matmul and their tile, whole | in lanes\n" + _table(["tokens", *names], rows)


def _wave_text(filled: dict[str, Any]) -> str:
    return f"{filled['waves']} {filled['tile']}"


def _pipeline_text(rows: Sequence[dict[str, Any]], size: int) -> str:
    cells = [
        [f"{row['tokens']}"]
        + [f"{row['first_token_ms'][kind]:.1f}" for kind in ("tensor", "pipeline")]
        + [f"{row['micro_batches']}", f"{row['bubble']:.0%}"]
        + [f"{row['per_token_ms'][kind]:.2f}" for kind in ("tensor", "pipeline")]
        for row in rows
    ]
    headers = ["tokens", "first token tp", "pp", "micro-batches", "bubble", "per token tp", "pp"]
    return (
        f"The same {size} GPUs as pipeline stages (pp), ms\n{_table(headers, cells)}\n"
        "A decoded token passes all pipeline stages one after the other, each reading its layers' weights whole; split "
        "by tensor, all GPUs read their parts at once."
    )


def _memory_text(found: dict[str, Any]) -> str:
    memory = dict(found["inference_memory_bytes"])
    available, total = memory.pop("of"), memory["total"]
    rows = [[name.replace("_", " "), _gb(value)] for name, value in memory.items()]
    free = (available - total + memory["kv_cache"]) // found["kv_bytes_per_token"]
    room = f"; there is room for a cache of {free} tokens" if available and free > 0 else ""
    training = found["training_memory_bytes"]
    return (
        f"Memory of the heaviest rank, inference, GB (of {_gb(available)})\n{_table(['', 'GB'], rows)}\n"
        f"KV cache of {found['kv_tokens']} tokens{room}.\n"
        f"Training without activations: {_gb(training[0]['total'])} GB (16 bytes a parameter), "
        f"{_gb(training[1]['total'])} GB with float32 gradients (20)."
    )


def _balance_text(rows: Sequence[dict[str, Any]]) -> str:
    headers = list(rows[0])
    dealt: dict[tuple[float, ...], list[int]] = {}  # ranks that hold the same
    for row in rows:
        dealt.setdefault(tuple(row[name] for name in headers[1:]), []).append(row["rank"])
    cells = [[", ".join(map(str, ranks)), *map(str, parts)] for parts, ranks in dealt.items()]
    mean = sum(row["parameters"] for row in rows) / len(rows)
    heaviest = max(row["parameters"] for row in rows) / mean
    table = _table(["ranks", *(name.replace("_", " ") for name in headers[1:])], cells)
    work = max(row["work"] for row in rows)
    return (
        f"What each rank is dealt\n{table}\n"
        f"The heaviest rank holds {heaviest:.3f} x the mean, and has {work:.3f} x the mean work."
    )


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [list(headers), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def _gb(value: float) -> str:
    return f"{value / 1e9:.2f}"
