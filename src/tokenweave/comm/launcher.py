"""Run one function on every rank and collect what it returns."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tokenweave.comm.processes import start_ranks


def launch(
    fn: Callable[..., Any],
    tensor_parallel_size: int = 2,
    collective: str = "auto",
    device: str = "cpu",
    args: Sequence[Any] = (),
    timeout: float = 60.0,
    threads: int | None = None,
    pin: bool = False,
) -> list[Any]:
    """Run fn(group, *args) on every rank, a process each; returns the results in rank order.

    fn is sent with cloudpickle, so that a function of a script without a __main__ guard or of a notebook will do.
    device: "cpu", or "cuda" for a GPU each; ranks that outnumber the GPUs share them, in turns, which rank 0 says on
    stderr. timeout: seconds that any wait inside a collective may take; what fn itself takes is not limited.
    threads: torch's, per rank; by default an equal share of the usable cores. pin: give each rank cores of its own.
    Raises a rank's exception, with a note that names the rank; RankError, a CommunicationError, if a rank died. No
    process is left behind, however this ends.
    """
    target = functools.partial(_call, fn)
    with start_ranks(
        target, tensor_parallel_size, args,
        collective=collective, device=device, timeout=timeout, threads=threads, pin=pin,
    ) as ranks:  # fmt: skip
        return ranks.results()


def _call(fn: Callable[..., Any], group: Any, links: Any, *args: Any) -> Any:
    return fn(group, *args)
