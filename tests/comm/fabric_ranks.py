"""What every rank of test_fabric runs. CUDA only."""

import random
from typing import Any

import comm_ranks
import torch

from tokenweave.comm import Group
from tokenweave.execute.capture import GraphPool

HIDDEN = (64, 576, 4096, 8192)
COUNTS = (0, 1, 2, 3, 13, 128, 577, 8192)


def all_checks(group: Group) -> dict[Any, Any]:
    """What `comm_ranks.fused` finds, by (hidden size, dtype), and `replays`."""
    torch.set_default_device(group.device)
    found: dict[Any, Any] = {
        (hidden, dtype): comm_ranks.fused(group, hidden, dtype, COUNTS)
        for hidden in HIDDEN
        for dtype in comm_ranks.DTYPES
    }
    return found | {"replays": replays(group, 4096, [1, 3, 64, 577, 2048], 2000)}


def replays(group: Group, hidden: int, sizes: list[int], rounds: int) -> list[bool]:
    """Two lanes' graphs of several sizes, replayed in one random order, each rank late by times of its own; whether
    every result had the bits of the first run."""
    order, delays = random.Random(1), random.Random(100 + group.rank)
    same = []
    with group.open_collective(hidden, max(sizes), torch.bfloat16, 2) as collective:
        pool, side = GraphPool(group.device), torch.cuda.Stream(group.device)
        weight = torch.ones(hidden)
        cases = []
        for tokens in sizes:
            partials, residual, _ = comm_ranks.inputs(group, tokens, hidden, torch.bfloat16, True)
            source, start = partials[group.rank], residual[group.rows(tokens)]
            rows = [start.clone(), start.clone()]

            def run(source=source, start=start, rows=rows, tokens=tokens) -> list[torch.Tensor]:
                here, results = torch.cuda.current_stream(), []
                side.wait_stream(here)
                for lane, stream in enumerate((here, side)):
                    with torch.cuda.stream(stream):
                        rows[lane].copy_(start)
                        buffer = collective.buffer(lane, tokens)
                        buffer.copy_(source)
                        results.append(
                            collective.all_reduce_add_rms_norm(buffer, rows[lane], weight, 1e-5, lane=lane, budget=8)
                        )
                here.wait_stream(side)
                return results

            first = [result.clone() for result in run()]
            collective.barrier()
            cases.append((*pool.capture(run), first, run))  # which holds the tensors that the graph reads
        for number in range(rounds):
            graph, results, first, _ = cases[order.randrange(len(cases))]
            if delays.random() < 0.3:
                torch.cuda._sleep(delays.randrange(200_000))
            graph.replay()
            if number % 50 == 0:
                torch.cuda.synchronize()
                same.append(all(torch.equal(a, b) for a, b in zip(results, first, strict=True)))
        torch.cuda.synchronize()
        collective.check()
        collective.barrier()
    return same
