"""What every rank of test_fabric runs. CUDA only."""

import random

import torch

from tokenweave.comm import Group
from tokenweave.execute.capture import GraphPool


def inputs(tokens: int, hidden: int, dtype: torch.dtype, size: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens * 7919 + hidden)
    partials = [torch.randn(tokens, hidden, generator=generator).to(dtype) for _ in range(size)]
    return partials, torch.randn(tokens, hidden, generator=generator).to(dtype)


def fused(group: Group, hidden: int, dtype: torch.dtype, counts: list[int], weight: torch.Tensor) -> list:
    """(residual rows, normed rows) of each count, on the CPU."""
    results = []
    with group.open_collective(hidden, max(counts), dtype) as collective:
        for tokens in counts:
            partials, residual = inputs(tokens, hidden, dtype, group.size)
            own = residual[group.rows(tokens)].to(group.device)
            buffer = collective.buffer(0, tokens)
            buffer.copy_(partials[group.rank])
            normed = collective.all_reduce_add_rms_norm(buffer, own, weight.to(group.device), 1e-5)
            collective.barrier()
            results.append((own.cpu(), normed.cpu()))
            collective.barrier()
    return results


def replays(group: Group, hidden: int, sizes: list[int], rounds: int) -> list[bool]:
    """Two lanes' graphs of several sizes, replayed in one random order, each rank late by times of its own; whether
    every result had the bits of the first run."""
    order, delays = random.Random(1), random.Random(100 + group.rank)
    same = []
    with group.open_collective(hidden, max(sizes), torch.bfloat16, 2) as collective:
        pool, side = GraphPool(group.device), torch.cuda.Stream(group.device)
        weight = torch.ones(hidden, device=group.device)
        cases = []
        for tokens in sizes:
            partials, residual = inputs(tokens, hidden, torch.bfloat16, group.size)
            source = partials[group.rank].to(group.device)
            start = residual[group.rows(tokens)].to(group.device)
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
            cases.append((pool.capture(run), first))
        for number in range(rounds):
            (graph, results), first = cases[order.randrange(len(cases))]
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
