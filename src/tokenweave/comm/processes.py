"""Ranks as processes: started, watched and always ended by the caller.

    ranks = start_ranks("package.module:main", size=2, args=(config,))    # or any callable
    # in each rank: main(group, links, *args); links.parent is the caller, links.peers joins rank 0 to every other rank
    ranks.send(0, request); answer = ranks.receive(0); values = ranks.results(); ranks.close()

A rank's exception is raised here with its own type; a rank that died raises RankError. Everything travels over
anonymous pipes and anonymous memory files, handed down as descriptors: nothing has a name, nothing listens.
"""

import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

import cloudpickle

from tokenweave.comm.collective import CommunicationError
from tokenweave.comm.control import ARENA_BYTES
from tokenweave.comm.ladder import choose
from tokenweave.comm.links import Link
from tokenweave.comm.linux import memfd
from tokenweave.comm.rank_process import RankError, RankProcess
from tokenweave.config import partition

__all__ = ["RankError", "RankProcesses", "start_ranks"]

_ROOT_SECONDS = 0.5  # how long to wait for the root of a failure
_REPORT_SECONDS = 1.0  # what the other ranks then get to end by themselves


def start_ranks(
    target: str | Callable[..., Any],
    size: int,
    args: Sequence[Any] = (),
    *,
    collective: str = "auto",
    device: str = "cpu",
    timeout: float = 60.0,
    threads: int | None = None,
    pin: bool = False,
    emulation: Any = None,
    environment: Mapping[str, str] | None = None,
) -> "RankProcesses":
    """Start `size` ranks that each run target(group, links, *args); returns while they still import torch (about 2 s).

    target: "module:function", or a callable, sent with cloudpickle (one of a script or a notebook cell will do).
    timeout: seconds that any wait inside a collective may take. threads: torch's, per rank; by default an equal share
    of the usable cores. pin: give each rank cores of its own. emulation: an `emulated.Emulation` of `size`
    ranks, for the collective "emulated": one process is started, which is rank 0 of them. environment: variables of
    the ranks, over the caller's.
    Raises ValueError for settings that cannot work, before anything is started.
    """
    if size < 1:
        raise ValueError(f"tensor_parallel_size must be at least 1, got {size}")
    if timeout <= 0:
        raise ValueError(f"timeout must be positive, got {timeout}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    rung = choose(collective, device)
    if collective == "emulated" and emulation is None:
        raise ValueError("collective 'emulated' is for tune and the benchmarks, by --emulate-tp: its results are wrong")
    if collective != "emulated" and emulation is not None:
        raise ValueError(f"an emulation needs the collective 'emulated', got {collective!r}")
    processes = size if emulation is None else 1
    cores = sorted(os.sched_getaffinity(0))
    if pin and processes > len(cores):
        raise ValueError(f"cannot pin {processes} ranks: there are {len(cores)} usable cores")
    settings = {
        "size": processes, "collective": rung, "device": device, "timeout": timeout,
        "threads": threads or max(1, len(cores) // processes), "parent": os.getpid(),
        "environment": dict(environment or {}),
    }  # fmt: skip
    pinning = [cores[partition(len(cores), processes, rank)] if pin else None for rank in range(processes)]
    return RankProcesses(settings, cloudpickle.dumps((target, tuple(args), emulation)), pinning)


class RankProcesses:
    """The running ranks. One thread may wait on them while another sends. A context manager."""

    def __init__(self, settings: dict[str, Any], body: bytes, pinning: list[list[int] | None]) -> None:
        self.size: int = settings["size"]
        self._ranks: list[RankProcess] = []
        self._failure: BaseException | None = None
        self._closed = False
        try:
            self._start(settings, pinning)
            setup = {
                "sys_path": [os.path.abspath(p) for p in sys.path],  # "" is the current directory
                "python_path": os.environ.get("PYTHONPATH"),
                "pids": self.pids,
            }
            for rank in self._ranks:
                rank.send_setup(pickle.dumps(setup) + body)
        except BaseException:
            self.close(grace=0.0)
            raise

    def _start(self, settings: dict[str, Any], pinning: list[list[int] | None]) -> None:
        memory = {"arena": memfd("tokenweave", ARENA_BYTES), "store": memfd("tokenweave-store", 0)}
        peers = {rank: Link.pair() for rank in range(1, self.size)}
        try:
            for rank in range(self.size):
                links = {r: near for r, (near, _) in peers.items()} if rank == 0 else {0: peers[rank][1]}
                self._ranks.append(RankProcess({**settings, **memory, "rank": rank}, links, pinning[rank]))
        finally:
            for fd in memory.values():
                os.close(fd)
            for link in (end for pair in peers.values() for end in pair):
                link.close()

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def send(self, rank: int, value: Any) -> None:
        """Send an object to a rank's links.parent. Raises as `receive` if that rank has gone."""
        self._check_usable()
        try:
            self._ranks[rank].link.send(value)
        except BrokenPipeError:
            self._raise_why_gone(rank)

    def receive(self, rank: int = 0, timeout: float | None = None) -> Any:
        """The next object that `rank` sent through links.parent.

        Raises as soon as any rank has died or raised, but what `rank` sent before comes first; EOFError once the rank's
        function has returned; TimeoutError after `timeout` seconds.
        """
        if not self.poll(rank, timeout):
            raise TimeoutError(f"rank {rank} sent nothing for {timeout} s")
        return self._ranks[rank].message()

    def poll(self, rank: int = 0, timeout: float | None = 0.0) -> bool:
        """Whether an object from `rank` is there; waits up to `timeout` seconds, None for ever. Raises as `receive`."""
        self._check_usable()
        awaited = self._ranks[rank]
        deadline = _deadline(timeout)
        while not awaited.has_message():
            self._update()
            if awaited.has_message():
                break
            self._raise_any_failure()
            if awaited.returned:
                self._raise_why_gone(rank)
            if (left := _left(deadline)) == 0.0:
                return False
            self._wait(left, awaited)
        return True

    def check(self) -> None:
        """Raise if any rank has failed; does not wait."""
        self._check_usable()
        self._update()
        self._raise_any_failure()

    def results(self, timeout: float | None = None) -> list[Any]:
        """Every function's value, in rank order, once all have returned. TimeoutError after `timeout` seconds."""
        deadline = _deadline(timeout)
        while True:
            self.check()
            waiting = [rank.rank for rank in self._ranks if not rank.returned]
            if not waiting:
                return [rank.value for rank in self._ranks]
            if (left := _left(deadline)) == 0.0:
                raise TimeoutError(f"no result from ranks {waiting} after {timeout} s")
            self._wait(left)

    def close(self, grace: float = 1.0) -> None:
        """Close the links, which tells the ranks to end; after `grace` seconds kill what is left. Never raises."""
        if self._closed:
            return
        self._closed = True
        self._finish(grace)
        for rank in self._ranks:
            rank.kill()

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(grace=1.0 if kind is None else 0.0)

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise RuntimeError("the ranks are closed")

    def _update(self) -> None:
        for rank in self._ranks:
            rank.update()

    def _wait(self, timeout: float | None, awaited: RankProcess | None = None) -> None:
        """Sleep until something comes from any rank."""
        wait([s for rank in self._ranks for s in rank.sources(link=rank is awaited)], timeout)

    def _finish(self, grace: float) -> None:
        for rank in self._ranks:
            rank.close_link()
        deadline = time.monotonic() + grace
        for rank in self._ranks:
            rank.finish(deadline)

    def _raise_any_failure(self) -> None:
        """If a rank has failed, end all and raise the root of it."""
        if not self._failures():
            return
        # What fails because a peer has gone is only the echo of what happened to the peer, which is about to be told.
        deadline = time.monotonic() + _ROOT_SECONDS
        while all(map(_is_echo, self._failures())) and (left := deadline - time.monotonic()) > 0:
            if all(rank.ended for rank in self._ranks):
                break
            self._wait(left)
            self._update()
        self._failure = min(self._failures(), key=_is_echo)
        self._finish(_REPORT_SECONDS)
        self.close(grace=0.0)
        raise self._failure

    def _failures(self) -> list[BaseException]:
        return [rank.failure for rank in self._ranks if rank.failure is not None]

    def _raise_why_gone(self, rank: int) -> None:
        """The rank's end of its link is closed: raise its failure, or EOFError if its function has returned."""
        deadline = time.monotonic() + _REPORT_SECONDS
        while not self._ranks[rank].reported and (left := deadline - time.monotonic()) > 0:
            self._wait(left)
            self._update()
        self._raise_any_failure()
        raise EOFError(f"rank {rank} has closed its link: its function has returned")


def _is_echo(error: BaseException) -> bool:
    return isinstance(error, CommunicationError) and not isinstance(error, RankError)


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
