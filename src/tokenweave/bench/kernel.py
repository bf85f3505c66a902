"""tokenweave bench kernel: the fused kernel alone on one GPU, every peer's memory being this GPU's own.

For each number of thread blocks: rows of 8 ranks in and out (p2p), and one row in and out for each row of this rank (as
through a switch that adds and copies). Beside it the time of a copy. Medians of replays of a graph of ten launches.
"""

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from tokenweave.bench import output
from tokenweave.comm.emulated import TRAFFIC, Emulation, emulated_group

RANKS, LAUNCHES, REPLAYS = 8, 10, 31


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=8192, help="hidden size (default: 8192)")
    parser.add_argument("--tokens", type=int, default=8192, help="rows of all ranks (default: 8192)")
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64, 128], help="thread blocks (default: 2 to 128)"
    )
    output.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise ValueError("bench kernel needs a GPU that torch can use; there is none")
    if args.plot:
        output.check_plot(args.plot)
    if args.tokens < RANKS or args.hidden < 1 or min(args.blocks) < 1:
        raise ValueError(f"--tokens must be at least {RANKS}, --hidden and --blocks at least 1")
    rows = measure(args.tokens, args.hidden, args.blocks)
    print(output.table(list(rows[0]), [[_shown(value) for value in row.values()] for row in rows]))
    print(f"{torch.cuda.get_device_name()}, [{args.tokens}, {args.hidden}] bfloat16; medians of {REPLAYS} replays")
    if args.json:
        output.write_json(args.json, rows)
    if args.plot:
        _plot(args.plot, rows)
    return 0


def measure(tokens: int, hidden: int, blocks: list[int]) -> list[dict[str, Any]]:
    source = torch.randn(tokens, hidden, device="cuda").bfloat16()
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds(lambda: target.copy_(source))
    own, row_bytes = tokens // RANKS, 2 * hidden
    rows = []
    for traffic in TRAFFIC:
        moved = (2 * (own if traffic == "multicast" else tokens) + 2 * own) * row_bytes
        with emulated_group(_unpaced(traffic)) as group, group.open_collective(hidden, tokens, torch.bfloat16) as c:
            buffer, weight = c.buffer(0, tokens), torch.ones(hidden, device="cuda").bfloat16()
            residual = torch.randn(own, hidden, device="cuda").bfloat16()
            operation = functools.partial(c.all_reduce_add_rms_norm, buffer, residual, weight, 1e-5)
            for budget in blocks:
                taken = seconds(functools.partial(operation, budget=budget))
                rows.append({
                    "traffic": traffic, "blocks": budget, "µs": 1e6 * taken, "TB/s": moved / taken / 1e12,
                    "copy %": 100 * moved / taken / copied,
                })  # fmt: skip
    return rows


def seconds(call: Callable[[], object]) -> float:
    """Of one call, in a graph of several."""
    stream = torch.cuda.Stream()
    times = []
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(LAUNCHES):
                call()
        graph.replay()
        for _ in range(REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / LAUNCHES)
    return statistics.median(times)


def _unpaced(traffic: str) -> Emulation:
    def nothing(tokens: float) -> float:
        return 0.0

    return Emulation(
        size=RANKS, traffic=traffic, fused={1: nothing}, all_reduce=nothing, reduce_scatter=nothing, all_gather=nothing
    )


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _plot(path: str, rows: list[dict[str, Any]]) -> None:
    fig, axes = output.figure()
    for traffic in TRAFFIC:
        found = [row for row in rows if row["traffic"] == traffic]
        axes.plot([row["blocks"] for row in found], [row["µs"] for row in found], marker="o", label=traffic)
    axes.set(xscale="log", yscale="log", xlabel="thread blocks", ylabel="µs")
    axes.legend()
    fig.savefig(path)
