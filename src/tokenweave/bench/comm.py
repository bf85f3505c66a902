"""tokenweave bench comm: a reduction and the norm behind it, in each mode, over each CPU collective.

The modes take turns within one run, so that what else the machine does falls on all alike. Timed on every rank, from
Python's call to its return; the slowest rank counts.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from tokenweave.bench import comm_columns, output
from tokenweave.comm import Collective, Group, launch
from tokenweave.execute.modes import REDUCTIONS, SHARDED
from tokenweave.layers.norm import RMSNorm
from tokenweave.plan.step import StepPlan

COLLECTIVES = ("shared_memory", "distributed")
PRIVATE = "fused, private"  # the partial lies outside the communication buffer
MODES = ("serial", "reordered", "fused", PRIVATE)
PASSES = {"serial": 4, "reordered": 5, "fused": 2, PRIVATE: 3}  # reduce, add, norm twice, gather | both in one | a copy
WARM, BLOCK = 3, 12  # untimed and timed calls in a row, so that a mode meets the caches as it leaves them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tp", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: a GPU for each rank")
    parser.add_argument("--hidden", type=int, default=4096, help="hidden size (default: 4096)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1, 16, 128, 512, 1024, 2048],
        help="sizes (default: 1 16 128 512 1024 2048)",
    )  # fmt: skip
    parser.add_argument(
        "--collective", nargs="+", default=list(COLLECTIVES), choices=COLLECTIVES, help="(default: both)"
    )
    parser.add_argument("--repeats", type=int, default=60, help="timed calls of each mode, at least 31 (default: 60)")
    output.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.repeats < 31:
        raise ValueError(f"--repeats must be at least 31, got {args.repeats}")
    if args.tp < 1 or args.hidden < 1 or min(args.tokens) < 1:
        raise ValueError("--tp, --hidden and --tokens must be at least 1")
    if args.plot:
        output.check_plot(args.plot)
    if args.device == "cuda":
        from tokenweave.bench import comm_gpus

        return comm_gpus.run(args)
    rows, columns = [], []
    for name in tqdm(args.collective, unit="collective", disable=None, leave=False):
        job = (args.hidden, getattr(torch, args.dtype), tuple(args.tokens), args.repeats)
        pin = args.tp <= len(os.sched_getaffinity(0))
        rows += _rows(name, launch(measure, args.tp, name, args=job, threads=1, pin=pin), args)
        columns += comm_columns.compare(name, args.tp, args.hidden, job[1], args.tokens, args.repeats)
    print(output.table(list(rows[0]), [[_shown(value) for value in row.values()] for row in rows]))
    print(
        f"{args.tp} ranks, pinned if the cores suffice, one thread each, hidden size {args.hidden}, "
        f"{args.dtype}; medians of {args.repeats} or more calls, slowest rank\n"
        "MB: read and written by a rank, if every operation were one perfect kernel. passes: times a row goes through "
        "memory.\ncopy %: bytes a second, beside those of all ranks at once copying as many bytes in as much memory"
    )
    print(f"\n{comm_columns.shown(columns)}\nEach rank has 1/{args.tp} of the columns; all ranks get all.")
    if args.json:
        output.write_json(args.json, rows, columns=columns)
    if args.plot:
        _plot(args.plot, rows)
    return 0


def measure(group: Group, hidden: int, dtype: torch.dtype, sizes: tuple[int, ...], repeats: int) -> dict[Any, float]:
    """One rank: median seconds by (tokens, mode), and of a copy of as many bytes as fused moves by (tokens, "copy")."""
    norm = RMSNorm(hidden, 1e-5, dtype=dtype)
    seconds = {}
    with group.open_collective(hidden, max(sizes), dtype) as collective:
        for tokens in sizes:
            torch.manual_seed(group.rank)
            calls = {mode: _call(collective, group, mode, norm, tokens) for mode in MODES}
            calls["copy"] = _copy(bytes_moved("fused", tokens, group.size, hidden * dtype.itemsize))
            times: dict[str, list[float]] = {name: [] for name in calls}
            while len(times["copy"]) < repeats:
                for name, call in calls.items():
                    collective.barrier()
                    for _ in range(WARM):
                        call()
                    for _ in range(BLOCK):
                        start = time.perf_counter()
                        call()
                        times[name].append(time.perf_counter() - start)
            seconds.update({(tokens, name): statistics.median(taken) for name, taken in times.items()})
    return seconds


def bytes_moved(mode: str, tokens: int, size: int, row_bytes: int) -> int:
    """What one rank must read and write, averaged over ranks, if every operation in it were one perfect kernel."""
    own = tokens / size
    rows = {
        "serial": 2 * tokens + 4 * tokens,  # all-reduce | add and norm: rows and residual in and out
        "reordered": (tokens + own) + 4 * own + (own + tokens),  # reduce-scatter | add and norm | all-gather
        "fused": (tokens + own) + (own + tokens),  # partials and residual in | residual and every rank's rows out
    }
    rows[PRIVATE] = rows["fused"] + 2 * (tokens - own)
    return round(rows[mode] * row_bytes)


def _call(collective: Collective, group: Group, mode: str, norm: RMSNorm, tokens: int) -> Callable[[], object]:
    hidden, dtype = norm.weight.shape[0], norm.weight.dtype
    name = "fused" if mode == PRIVATE else mode
    partial = torch.randn(tokens, hidden).to(dtype)
    if mode != PRIVATE:
        partial = collective.buffer(0, tokens).copy_(partial)
    rows = group.rows(tokens)
    residual = torch.randn(rows.stop - rows.start if name in SHARDED else tokens, hidden).to(dtype)
    if name == "fused":
        weight = norm.weight
        return lambda: collective.all_reduce_add_rms_norm(partial, residual, weight, 1e-5)
    reduce = REDUCTIONS[name](collective, residual, StepPlan(name))
    return lambda: reduce(partial, norm)


def _copy(count: int) -> Callable[[], object]:
    """memcpy that reads and writes count bytes, in as much memory as the fused operation uses: it goes through half of
    its bytes twice, residuals and rows, so that caches help it as much."""
    source, target = np.ones(count // 4, np.uint8), np.ones(count // 4, np.uint8)

    def copy() -> None:
        np.copyto(target, source)
        np.copyto(source, target)

    return copy


def _rows(name: str, ranks: list[dict[Any, float]], args: argparse.Namespace) -> list[dict[str, Any]]:
    row_bytes = args.hidden * getattr(torch, args.dtype).itemsize
    rows = []
    for tokens in args.tokens:
        seconds = {mode: max(rank[tokens, mode] for rank in ranks) for mode in (*MODES, "copy")}
        copied = bytes_moved("fused", tokens, args.tp, row_bytes) / seconds["copy"]
        best = min(MODES, key=seconds.__getitem__)
        for mode in MODES:
            moved = bytes_moved(mode, tokens, args.tp, row_bytes)
            rows.append({
                "collective": name,
                "tokens": tokens,
                "mode": mode,
                "µs": 1e6 * seconds[mode],
                "MB": moved / 1e6,
                "norm rows": tokens if mode == "serial" else -(-tokens // args.tp),
                "passes": PASSES[mode],
                "copy %": 100 * moved / seconds[mode] / copied,
                "÷ serial": seconds["serial"] / seconds[mode],
                "wins": "<" if mode == best else "",
            })  # fmt: skip
    return rows


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if value < 100 else f"{value:.0f}"
    return str(value)


def _plot(path: str, rows: list[dict[str, Any]]) -> None:
    fig, axes = output.figure()
    for name in dict.fromkeys(row["collective"] for row in rows):
        for mode in MODES:
            points = [(row["tokens"], row["µs"]) for row in rows if row["collective"] == name and row["mode"] == mode]
            axes.plot(
                *zip(*points, strict=True),
                marker="o",
                ls="-" if name == COLLECTIVES[0] else "--",
                label=f"{name}, {mode}",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens")
    axes.set_ylabel("µs")
    axes.legend(fontsize="small")
    fig.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tokenweave.bench.comm", description=__doc__)
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
