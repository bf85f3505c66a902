"""tokenweave bench comm --device cuda: a reduction and the norm behind it on ranks that have GPUs of their own.

NCCL's all-reduce, add and RMSNorm; the same reordered, by NCCL; and the fused operation on so many thread blocks. Each
is a CUDA graph of CALLS calls, and the graphs take turns. The slowest rank counts.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tokenweave.bench import output
from tokenweave.bench.nccl import NcclOperations
from tokenweave.comm import Group, launch
from tokenweave.execute.capture import GraphPool
from tokenweave.layers.norm import RMSNorm
from tokenweave.layers.residual import add_rms_norm

CALLS, ROUNDS = 10, 21
BUDGETS = (2, 4, 8, 12, 16, 32, 64)
LINK = 400e9  # bytes/s one way between two H200s on 18 NVLinks, as a large copy reaches it (450 on paper)


def run(args: argparse.Namespace) -> int:
    job = (args.hidden, getattr(torch, args.dtype), tuple(args.tokens))
    ranks = launch(measure, args.tp, "symmetric", device="cuda", args=job)
    rows = []
    for tokens in job[2]:
        seconds = {name: max(rank[tokens, name] for rank in ranks) for size, name in ranks[0] if size == tokens}
        rows.append({"tokens": tokens} | {f"{name} us": 1e6 * taken for name, taken in seconds.items()})
        crossing = (args.tp - 1) / args.tp * tokens * args.hidden * job[1].itemsize
        rows[-1]["link us"] = 1e6 * 2 * crossing / LINK  # partials that peers read, and rows written to them
        fused = {name: taken for name, taken in seconds.items() if name.startswith("fused")}
        few = min(taken for name, taken in fused.items() if int(name.split()[1]) <= 16)
        rows[-1]["NCCL ÷ fused, <= 16 blocks"] = seconds["NCCL"] / few
    headers = list(dict.fromkeys(name for row in rows for name in row))
    print(output.table(headers, [[_shown(row.get(name)) for name in headers] for row in rows]))
    print(
        f"{args.tp} ranks, a GPU each, hidden size {args.hidden}, {args.dtype}; medians of {ROUNDS} replays of {CALLS} "
        "calls, interleaved\nNCCL: all-reduce, add, RMSNorm; fused N: on N thread blocks; link: the bytes that leave a "
        f"rank over {LINK / 1e9:.0f} GB/s"
    )
    if args.json:
        output.write_json(args.json, rows)
    if args.plot:
        _plot(args.plot, rows)
    return 0


def measure(group: Group, hidden: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> dict[Any, float]:
    """One rank: median seconds by (tokens, competitor)."""
    norm = RMSNorm(hidden, 1e-5, dtype=dtype, device=str(group.device))
    seconds: dict[Any, float] = {}
    with group.open_collective(hidden, max(sizes), dtype) as collective, torch.inference_mode():
        nccl = NcclOperations(collective, group.device)
        pool = GraphPool(group.device)
        for tokens in sizes:
            calls = _calls(collective, nccl, group, norm, tokens)
            graphs = {}
            for name, call in calls.items():
                call()
                collective.barrier()
                graphs[name] = pool.capture(partial(_repeat, call))[0]
            times: dict[str, list[float]] = {name: [] for name in graphs}
            for _ in range(ROUNDS):
                for name, graph in graphs.items():
                    collective.barrier()
                    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    began.record()
                    graph.replay()
                    ended.record()
                    ended.synchronize()
                    times[name].append(began.elapsed_time(ended) / 1e3 / CALLS)
            collective.check()
            seconds |= {(tokens, name): statistics.median(taken) for name, taken in times.items()}
    return seconds


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(CALLS):
        call()


def _calls(
    collective: Any, nccl: NcclOperations, group: Group, norm: RMSNorm, tokens: int
) -> dict[str, Callable[[], object]]:
    """Values stay of normal size however often they run: NCCL averages where a model's ranks would add."""
    hidden, weight = norm.weight.shape[0], norm.weight
    rows_in = collective.buffer(0, tokens).normal_()
    own = group.rows(tokens)
    whole, part = torch.randn_like(rows_in), torch.randn_like(rows_in[own])

    def library() -> None:
        dist.all_reduce(rows_in, dist.ReduceOp.AVG, group=nccl.nccl)
        add_rms_norm(rows_in, whole, norm)

    def reordered() -> None:
        rows = rows_in.new_empty(own.stop - own.start, hidden)
        dist.reduce_scatter_tensor(rows, rows_in, dist.ReduceOp.AVG, group=nccl.nccl)
        dist.all_gather_into_tensor(rows_in, add_rms_norm(rows, part, norm), group=nccl.nccl)

    def fused(blocks: int) -> Callable[[], object]:
        return lambda: collective.all_reduce_add_rms_norm(rows_in, part, weight, norm.eps, budget=blocks)

    calls: dict[str, Callable[[], object]] = {"NCCL": library}
    if tokens % group.size == 0:
        calls["reordered"] = reordered
    return calls | {f"fused {blocks}": fused(blocks) for blocks in BUDGETS}


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _plot(path: str, rows: list[dict[str, Any]]) -> None:
    fig, axes = output.figure()
    for name in rows[-1]:
        if name.endswith(" us"):
            points = [(row["tokens"], row[name]) for row in rows if name in row]
            axes.plot(*zip(*points, strict=True), marker="o", label=name.removesuffix(" us"))
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="µs")
    axes.legend(fontsize="small")
    fig.savefig(path)
