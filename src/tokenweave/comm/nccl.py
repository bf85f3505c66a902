"""Process groups of NCCL's, which must not end the process when something goes wrong: that is told by `vigil`."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from tokenweave.comm.collective import CommunicationError
from tokenweave.comm.within import within

# By these torch ends the process: when an operation fails, when its own watching thread hangs, when another rank has
# put down what it saw of a failure.
_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT")
_CLOSE_SECONDS = 5.0


def connected(device: torch.device, patience: float) -> dist.ProcessGroup:
    """A group of all ranks of the world, each on a GPU of its own. Every rank makes it at the same time.

    It is connected, which a capture could not do. patience: seconds that this may take, and after which torch writes to
    the log that an operation is late; nobody does anything about that. Raises CommunicationError.
    """
    made: list[dist.ProcessGroup] = []
    try:
        within(patience, lambda: _connect(made, device, timedelta(seconds=patience)))
    except (TimeoutError, dist.DistError) as error:
        abort(made)
        raise CommunicationError(f"NCCL has not connected the ranks: {told_by(error)}") from error
    return made[0]


def _connect(made: list[dist.ProcessGroup], device: torch.device, timeout: timedelta) -> None:
    """Appends the group, which is not connected yet, as soon as there is one."""
    torch.cuda.set_device(device)  # of this thread
    with _without_handling():
        group = dist.new_group(backend="nccl", device_id=device, timeout=timeout)
    made.append(group)
    ones = torch.ones(group.size(), dtype=torch.uint8, device=device)
    dist.all_reduce(ones, group=group)
    dist.broadcast(ones, 0, group=group)
    dist.all_to_all_single(torch.empty_like(ones), ones, group=group)
    torch.cuda.synchronize(device)


def told_by(error: Exception) -> str:
    """What NCCL said last, where torch passes that on: it names the cause. Else the first line."""
    whole = str(error).strip()
    _, _, last = whole.partition("Last error:")
    return (last.strip() or whole).splitlines()[0]


def abort(groups: list[dist.ProcessGroup]) -> None:
    """End what waits on the GPU, soon; returns at once.

    A thread for each: the first thing that an abort does is to end the group's kernels, but then it may wait for the
    GPU, and so for the other groups' kernels, and until no graph that they were captured in is left.
    """
    for group in groups:
        threading.Thread(target=_quietly, args=(group.abort,), daemon=True).start()


def destroyed(groups: list[dist.ProcessGroup]) -> bool:
    """Destroy them; False if that does not come to its end: a graph in which they were captured is still there."""
    gc.collect()  # graphs in cycles

    def destroy() -> None:
        for group in groups:
            dist.destroy_process_group(group)

    try:
        within(_CLOSE_SECONDS, lambda: _quietly(destroy))
    except TimeoutError:
        return False
    return True


def _quietly(run: Callable[[], object]) -> None:
    with suppress(Exception):  # the group has ended already
        run()


@contextmanager
def _without_handling() -> Iterator[None]:
    """Groups made within do not end the process when a peer is late or has died, here or on another rank."""
    before = {name: os.environ.get(name) for name in _HANDLING}
    os.environ.update(dict.fromkeys(_HANDLING, "0"))
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
