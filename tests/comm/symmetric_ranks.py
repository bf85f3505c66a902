"""What the ranks of the GPU collective's tests run, beside the checks of comm_ranks."""

import os
import random
import time

import comm_oracle as oracle
import comm_ranks
import failing_ranks
import torch

from tokenweave.comm import Collective, Group

SIZES = (0, 1, 2, 3, 13, 128, 577)
EPS = 1e-5


def all_checks(group: Group) -> dict[str, object]:
    """The checks of the CPU's collectives, on the GPU."""
    torch.set_default_device(group.device)
    checks = (
        comm_ranks.any_cut, comm_ranks.not_finite, comm_ranks.layers, comm_ranks.separate_operations,
        comm_ranks.gather_and_broadcast, comm_ranks.refused, comm_ranks.copies, replayed, poisoned,
    )  # fmt: skip
    return {"fused": fused(group), **{check.__name__: check(group) for check in checks}}


def fused(group: Group) -> list[str]:
    wrong = []
    for hidden in (33, 64, 576, 577, 4096, 8192):
        for dtype in comm_ranks.DTYPES:
            wrong += comm_ranks.fused(group, hidden, dtype, SIZES)[0]
    return wrong + comm_ranks.fused(group, 8192, torch.bfloat16, (8192,))[0]


def poisoned(group: Group) -> list[str]:
    """A dependent operation right behind reads every row as written; the output held NaN before."""
    wrong = []
    with group.open_collective(4096, 1024, torch.bfloat16) as collective:
        for tokens in (*range(1, 17), 1024):
            partials, residual, weight = comm_ranks.inputs(group, tokens, 4096, torch.bfloat16, True)
            want = oracle.fused(partials, residual, weight, EPS)[1]
            buffer = collective.buffer(0, tokens)
            buffer.fill_(float("nan"))
            buffer.copy_(partials[group.rank])
            rows = residual[group.rows(tokens)].clone()
            read = collective.all_reduce_add_rms_norm(buffer, rows, weight, EPS, budget=3) * 1
            wrong += comm_ranks.same(f"{tokens} rows", read, want, oracle.tolerance(torch.bfloat16))
    return wrong


def replayed(group: Group, replays: int = 200) -> list[str]:
    """Graphs of several sizes, two lanes on two streams in each, replayed in one random order on all ranks with delays
    of each rank's own; every replay gives what the same calls gave before."""
    torch.set_default_device(group.device)
    hidden, rounds = 512, 3
    graphs = []
    weight = comm_ranks.draw(1, hidden)
    with group.open_collective(hidden, 640, torch.float32, lanes=2) as collective:
        for tokens in (1, 3, 64, 577):
            starts = [comm_ranks.draw(10 * tokens + group.rank + 100 * lane, tokens, hidden) for lane in (0, 1)]
            own = len(range(tokens)[group.rows(tokens)])
            residuals = [torch.zeros(own, hidden) for _ in range(2)]
            results = [torch.zeros(tokens, hidden) for _ in range(2)]

            def both(starts=starts, residuals=residuals, results=results, tokens=tokens) -> None:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                for lane, stream in ((0, torch.cuda.current_stream()), (1, side)):
                    with torch.cuda.stream(stream):
                        residuals[lane].zero_()
                        x = starts[lane]
                        for _ in range(rounds):
                            buffer = collective.buffer(lane, tokens)
                            buffer.copy_(x)
                            x = collective.all_reduce_add_rms_norm(
                                buffer, residuals[lane], weight, EPS, lane=lane, budget=2 + lane
                            )
                        results[lane].copy_(x)
                torch.cuda.current_stream().wait_stream(side)

            both()
            torch.cuda.synchronize()
            want = [result.clone() for result in results]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                both()
            graphs.append((graph, results, want, both))  # which holds the tensors that the graph reads
        order, delays = random.Random(7), random.Random(group.rank)
        wrong: set[str] = set()
        for number in range(replays):
            index = order.randrange(len(graphs))
            graph, results, want, _ = graphs[index]
            for result in results:
                result.fill_(float("nan"))
            if delays.random() < 0.2:
                torch.cuda._sleep(delays.randrange(2_000_000))
            graph.replay()
            if number % 10 == 9:
                torch.cuda.synchronize()
                collective.check()
                if not all(torch.equal(a, b) for a, b in zip(results, want, strict=True)):
                    wrong.add(f"graph {index} gave other bits")
    return sorted(wrong)


def late(group: Group) -> tuple[str, float]:
    """Rank 1 comes after the deadline. What the other ranks are told, and when."""
    torch.set_default_device(group.device)
    c = group.open_collective(64, 8, lanes=2, timeout=0.5)
    rows = torch.zeros(len(range(5)[group.rows(5)]), 64)
    if group.rank == 1:
        time.sleep(1.5)
    start = time.monotonic()
    return failing_ranks.message(lambda: settled(c, c.all_reduce_add_rms_norm, rows)), time.monotonic() - start


def settled(c: Collective, operation, rows: torch.Tensor) -> None:
    operation(c.buffer(1, 5), rows, torch.ones(64), EPS, lane=1)
    torch.cuda.synchronize()
    c.check()


def other_shape(group: Group) -> str:
    torch.set_default_device(group.device)

    def run() -> None:
        c = failing_ranks.opened(group)
        c.all_reduce(torch.zeros(6 if group.rank == 1 else 5, 64), lane=1)
        torch.cuda.synchronize()
        c.check()

    return failing_ranks.message(run)


def wait_for_the_dead(group: Group, links: object, notes: str) -> None:
    torch.set_default_device(group.device)
    c = group.open_collective(64, 8, lanes=2, timeout=30.0)
    c.barrier()
    if group.rank == 1:
        failing_ranks.write(notes, "victim", str(os.getpid()))
        time.sleep(60)
    told = failing_ranks.message(lambda: settled(c, c.all_reduce_add_rms_norm, torch.zeros(2 + group.rank, 64)))
    failing_ranks.write(notes, f"told-{group.rank}", told)


def captured(group: Group) -> str:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            group.open_collective(64, 8)
    except RuntimeError as error:
        return str(error)
    return "nothing was wrong"
