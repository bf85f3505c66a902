"""What every rank of test_nccl runs. CUDA only."""

import time

import comm_ranks
import fabric_ranks
import failing_ranks
import symmetric_ranks
import torch

from tokenweave.comm import Group

FUSED = ((64, torch.float32), (577, torch.bfloat16), (33, torch.float16), (4096, torch.bfloat16))
EPS = 1e-5


def checked_then_waiting(group: Group, links, notes: str) -> None:
    """All that does not end the group, told to the caller; then rank 1 dies while the others wait for it."""
    torch.set_default_device(group.device)
    found = {
        "collective": group.collective,
        "fused": [comm_ranks.fused(group, hidden, dtype, comm_ranks.SIZES) for hidden, dtype in FUSED],
        "replays": fabric_ranks.replays(group, 4096, [1, 3, 64, 577], 200),
    }
    for check in (comm_ranks.any_cut, comm_ranks.separate_operations, comm_ranks.gather_and_broadcast):
        found[check.__name__] = check(group)
    links.parent.send(found)
    symmetric_ranks.wait_for_the_dead(group, links, notes)


def late(group: Group) -> tuple[str, float, str]:
    """Rank 1 comes after the deadline to an operation of a replayed graph. What each rank is told, after how long, and
    at its next operation."""
    torch.set_default_device(group.device)
    c = group.open_collective(64, 8, lanes=2, timeout=0.5)
    residual, weight, side = torch.zeros(len(range(5)[group.rows(5)]), 64), torch.ones(64), torch.cuda.Stream()

    def run() -> None:
        c.all_reduce_add_rms_norm(c.buffer(1, 5), residual, weight, EPS, lane=1)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        run()
        graph.capture_end()
    graph.replay()
    c.barrier()

    def settled() -> None:
        graph.replay()
        torch.cuda.synchronize()
        c.check()

    if group.rank == 1:
        time.sleep(1.5)
    start = time.monotonic()
    told = failing_ranks.message(settled)
    return told, time.monotonic() - start, failing_ranks.message(c.barrier)


def other_shape(group: Group) -> str:
    """Rank 1 comes with other rows than rank 0."""
    torch.set_default_device(group.device)

    def run() -> None:
        c = failing_ranks.opened(group)
        c.all_reduce(torch.zeros(6 if group.rank == 1 else 5, 64), lane=1)
        time.sleep(1.0)  # they tell each other
        torch.cuda.synchronize()
        c.check()

    return failing_ranks.message(run)
