"""The part of bench comm that gathers column slices: by all-gather and by a zero-filled all-reduce, in turns."""

import os
import statistics
import time
from typing import Any

import torch

from tokenweave.bench import output
from tokenweave.comm import Group, launch
from tokenweave.comm.columns import all_gather_columns, all_reduce_columns, bytes_received
from tokenweave.config import partition

WAYS = {"all-gather": all_gather_columns, "zero-filled all-reduce": all_reduce_columns}
WARM, BLOCK = 2, 8  # untimed and timed calls in a row


def compare(collective: str, size: int, hidden: int, dtype: torch.dtype, sizes: list[int], repeats: int) -> list[dict]:
    """A row for each number of tokens and way: seconds of the slowest rank, bytes that each rank receives."""
    pin = size <= len(os.sched_getaffinity(0))
    ranks = launch(measure, size, collective, args=(hidden, dtype, sizes, repeats), threads=1, pin=pin)
    rows: list[dict[str, Any]] = []
    for tokens in sizes:
        seconds = {way: max(rank[tokens, way] for rank in ranks) for way in WAYS}
        for way in WAYS:
            rows.append({
                "collective": collective,
                "tokens": tokens,
                "columns gathered by": way,
                "µs": 1e6 * seconds[way],
                "MB received": bytes_received(way, tokens, hidden, size, dtype.itemsize) / 1e6,
                "÷ all-gather": seconds[way] / seconds["all-gather"],
            })  # fmt: skip
    return rows


def measure(
    group: Group, hidden: int, dtype: torch.dtype, sizes: list[int], repeats: int
) -> dict[tuple[int, str], float]:
    """One rank: median seconds by tokens and way."""
    widths = [part.stop - part.start for part in (partition(hidden, group.size, r) for r in range(group.size))]
    found = {}
    with group.open_collective(hidden, max(sizes) + 2 * group.size, dtype) as collective:
        for tokens in sizes:
            columns = torch.randn(tokens, widths[group.rank]).to(dtype)
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            while len(times["all-gather"]) < repeats:
                for way, gather in WAYS.items():
                    collective.barrier()
                    for turn in range(WARM + BLOCK):
                        start = time.perf_counter()
                        gather(collective, columns, widths, group.rank)
                        if turn >= WARM:
                            times[way].append(time.perf_counter() - start)
            found.update({(tokens, way): statistics.median(taken) for way, taken in times.items()})
    return found


def shown(rows: list[dict[str, Any]]) -> str:
    cells = [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    return output.table(list(rows[0]), cells)
