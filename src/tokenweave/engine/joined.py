"""An engine on ranks that somebody else has started, torchrun for one, on one host or on several.

Every rank runs the same program and makes the same calls in the same order, and gets the same answers. Rank 0's process
is caller and core at once: its engine runs in a thread. What its steps bring goes to the callers on all ranks, who
number their requests alike, so that the answers are theirs too.
"""

import os
import sys
import threading
import time
from dataclasses import replace
from math import inf
from pathlib import Path
from queue import SimpleQueue
from struct import Struct
from typing import Any

from tokenweave.comm.collective import CommunicationError
from tokenweave.comm.streams import StreamError, Streams
from tokenweave.engine.config import EngineConfig
from tokenweave.engine.event_codec import decode, encode
from tokenweave.engine.events import Ready, StepEvents
from tokenweave.engine.request import Request

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBER = Struct("!q")


def world() -> tuple[int, int]:
    """This process's rank and how many there are, as somebody else has started them; (0, 1) if nobody has."""
    distributed: Any = sys.modules.get("torch.distributed")  # a program with a world of its own has imported it
    if distributed is not None and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    if not all(name in os.environ for name in _VARIABLES):
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def suited(config: EngineConfig) -> EngineConfig:
    """The config with the world's tensor-parallel size; on CPUs unless GPUs are asked for, as hosts may differ in what
    they have. Raises ValueError for one that asks for something else."""
    _, size = world()
    if config.tensor_parallel_size not in (1, size):
        raise ValueError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but this process is one of {size} ranks that were "
            "started together; leave it out"
        )
    if config.pin:
        raise ValueError("pin cannot be used here: who has started the ranks decides where they run")
    device = "cpu" if config.device == "auto" else config.device
    return replace(config, tensor_parallel_size=size, device=device)


class StreamChannel:
    """A StepChannel over byte streams, which cross hosts. A rank that waits sleeps, however long; rank 0's end is the
    end of its connection, so nobody has to say anything while there is nothing to do."""

    def __init__(self, streams: Streams, rank: int, size: int, timeout: float) -> None:
        self._streams, self._timeout = streams, timeout
        self._peers = range(1, size) if rank == 0 else range(1)

    def least(self, value: int) -> int:
        """Waits however long: the others may be loading. Raises CommunicationError if a rank has ended."""
        try:
            return self._least(value)
        except StreamError as error:
            raise CommunicationError(f"rank {error.peer} has ended") from None

    def _least(self, value: int) -> int:
        lead = 0 not in self._peers
        if not lead:
            self._streams.post(0, memoryview(_NUMBER.pack(value)))
        told = {peer: bytearray(_NUMBER.size) for peer in self._peers}
        self._streams.receive({peer: memoryview(memory) for peer, memory in told.items()}, inf)
        values = [_NUMBER.unpack(memory)[0] for memory in told.values()]
        if not lead:
            return int(values[0])
        value = min(value, *values)
        for peer in self._peers:
            self._streams.post(peer, memoryview(_NUMBER.pack(value)))
        self._streams.flush(inf)
        return value

    def send(self, message: bytes) -> None:
        """Raises CommunicationError if a rank has ended, or has taken in nothing for as long as a wait may last."""
        try:
            for peer in self._peers:
                self._streams.post(peer, memoryview(_NUMBER.pack(len(message))), memoryview(message))
            self._streams.flush(time.monotonic() + self._timeout)
        except StreamError as error:
            why = "does not make the same calls as rank 0" if error.late else "has ended"
            raise CommunicationError(f"rank {error.peer} {why}") from None

    def receive(self) -> bytes | None:
        try:
            length = bytearray(_NUMBER.size)
            self._streams.receive({0: memoryview(length)}, inf)
            message = bytearray(_NUMBER.unpack(length)[0])
            self._streams.receive({0: memoryview(message)}, inf)
            return bytes(message)
        except StreamError:
            return None

    def close(self) -> None:
        self._streams.close()


class _LeadCaller:
    """What the engine on rank 0 talks to: the caller in its process, and by the mirror those on the other ranks."""

    def __init__(self, mirror: StreamChannel) -> None:
        self._mirror = mirror
        self.requests: SimpleQueue[Request | int | None] = SimpleQueue()
        self.events: SimpleQueue[Ready | StepEvents | None] = SimpleQueue()  # None: the engine has ended

    def poll(self) -> bool:
        return not self.requests.empty()

    def recv(self) -> Request | int | None:
        return self.requests.get()

    def send(self, events: Ready | StepEvents) -> None:
        self.events.put(events)
        self._mirror.send(encode(events))


class JoinedRanks:
    """This process's rank as EngineClient holds it: `send` and `receive` are those of RankProcesses.

    Raises ValueError if the collective cannot be used, CommunicationError if the ranks do not come together.
    """

    def __init__(self, directory: Path, config: EngineConfig) -> None:
        from tokenweave.comm.environment import group_of
        from tokenweave.comm.ladder import choose
        from tokenweave.comm.world import World

        rung = choose(config.collective, config.device, one_caller=False)
        joined = World.of_environment()
        self.rank, self._timeout = joined.rank, config.timeout
        self._group = group_of(joined, rung, config.device, config.timeout)
        steps, events = joined.open_lanes(2, config.timeout)
        self._steps = StreamChannel(steps, joined.rank, joined.size, config.timeout)
        self._mirror = StreamChannel(events, joined.rank, joined.size, config.timeout)
        self._caller = _LeadCaller(self._mirror)
        self._failure: BaseException | None = None
        self._made = threading.Condition()
        self._group_closes = threading.Lock()  # taken once, for good
        self._newest, self._closed = -1, False  # ident of the last request that this rank's caller has made
        self._engine = threading.Thread(target=self._run, args=(directory, config), daemon=True)
        self._engine.start()

    @property
    def pids(self) -> list[int]:
        return [os.getpid()]

    def send(self, rank: int, message: Request | int | None) -> None:
        if self.rank == 0:
            self._caller.requests.put(message)
        elif isinstance(message, Request):
            with self._made:
                self._newest = message.ident
                self._made.notify_all()

    def receive(self, rank: int = 0) -> Any:
        """What the engine brought next; on other ranks than 0 not before this rank has made the requests it is of.
        Raises what ended the engine."""
        events = self._caller.events.get() if self.rank == 0 else self._mirrored()
        if events is None:
            self._engine.join(self._timeout)
            raise self._failure or CommunicationError("rank 0 has ended")
        return events

    def close(self, grace: float = 1.0) -> None:
        """End the engine, when it has done its step; on other ranks when rank 0 ends it. Never raises."""
        with self._made:
            self._closed = True
            self._made.notify_all()
        self._caller.requests.put(None)
        self._engine.join(self._timeout if grace else 0.0)
        self._end()

    def _mirrored(self) -> Ready | StepEvents | None:
        message = self._mirror.receive()
        if message is None:
            return None
        events = decode(message)
        if isinstance(events, StepEvents):
            newest = max([*events.idents, *events.scores], default=-1)
            with self._made:
                self._made.wait_for(lambda: self._newest >= newest or self._closed)
        return events

    def _run(self, directory: Path, config: EngineConfig) -> None:
        import torch

        from tokenweave.engine.worker import run

        try:
            if config.threads is not None:
                torch.set_num_threads(config.threads)
            if self._group.device.type == "cuda":
                torch.cuda.set_device(self._group.device)  # of this thread
            run(self._group, self._caller, self._steps, directory, config)
        except BaseException as error:
            self._failure = error
        finally:
            self._caller.events.put(None)
            self._end()

    def _end(self) -> None:
        """Other ranks see the connections end. By the engine's thread and the caller's, whichever comes first."""
        self._steps.close()
        if self.rank == 0 or self._failure is not None or self._closed:
            self._mirror.close()  # a rank that only follows still reads what rank 0 has sent
        if self._group_closes.acquire(blocking=False):
            self._group.close()
