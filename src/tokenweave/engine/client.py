"""The caller's side of the rank processes: requests out, events in."""

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from tokenweave.engine.events import StepEvents
from tokenweave.engine.request import Request
from tokenweave.engine.stats import StepStats

STATS_KEPT = 4096  # steps
FAILURE_SECONDS = 5.0  # in which the ranks' end is known and done; it takes about one


@dataclass(frozen=True)
class Arrival:
    """What one step brought for one inbox: entries of `events`, and when the caller's process had them."""

    events: StepEvents
    entries: list[int]
    scores: list[int]
    time: float


Inbox = SimpleQueue[Arrival | BaseException]


class Ranks(Protocol):
    """RankProcesses, or this process as one of the ranks of a world."""

    @property
    def pids(self) -> list[int]: ...

    def send(self, rank: int, value: Any) -> None: ...

    def receive(self, rank: int) -> Any: ...

    def close(self, grace: float) -> None: ...


class EngineClient:
    """Sends requests to rank 0 and sorts what comes back into inboxes. Any thread may call it.

    A thread of its own waits for rank 0: an interrupt, which only reaches the main thread, never leaves a message half
    read, and a rank's death is noticed at once, whatever the caller is doing. After a failure all processes are ended,
    every inbox gets the error, and so does whoever calls next. A process forked from this one has no such thread, and
    the ranks are not its own: there every call raises, and closing does nothing.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._owner = ranks, os.getpid()
        self._idents = itertools.count()
        self._inboxes: dict[int, Inbox] = {}
        self._lock = threading.Lock()  # of what follows
        self._sending = threading.Lock()
        self._failure: BaseException | None = None
        self._closed = False
        self.stats: deque[StepStats] = deque(maxlen=STATS_KEPT)
        self._reader = threading.Thread(target=self._read, name="tokenweave-reader", daemon=True)
        self._reader.start()

    @property
    def pids(self) -> list[int]:
        return self._ranks.pids

    def new_ident(self) -> int:
        return next(self._idents)

    def submit(self, requests: Sequence[Request], inbox: Inbox) -> None:
        """Queue requests; `inbox` gets what comes of them."""
        self._check_owner()
        for request in requests:
            with self._lock:
                self._check()
                self._inboxes[request.ident] = inbox
            self._send(request)

    def cancel(self, idents: Sequence[int]) -> None:
        """Forget requests. Those that have finished, or all after a failure, are no error."""
        for ident in idents:
            with self._lock:
                known = self._inboxes.pop(ident, None) is not None
            if known and not self._closed:
                with suppress(Exception):  # what has happened to the ranks is told to those who wait for tokens
                    self._send(ident)

    def check(self) -> None:
        """Raise if the engine has failed, is closed or is another process's."""
        self._check_owner()
        with self._lock:
            self._check()

    def close(self) -> None:
        """End the ranks. Waiting inboxes get an error. Never raises."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            failed = self._failure is not None
        if not failed:
            with self._sending, suppress(Exception):  # rank 0 may have gone already
                self._ranks.send(0, None)
        self._reader.join(timeout=1.0)  # a rank in a long step does not hear of it in time: it is killed
        self._ranks.close(grace=1.0)

    def _check_owner(self) -> None:
        """Before any lock is asked for: a thread that is not here may have held it at the fork."""
        if os.getpid() != self._owner:
            raise RuntimeError("the engine is of the process that this one was forked from; make one here")

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise RuntimeError("the engine is closed")

    def _send(self, message: Request | int) -> None:
        try:
            # not under _lock: a full pipe drains only if rank 0 can send events, and the reader needs _lock for them
            with self._sending:
                self._ranks.send(0, message)
        except KeyboardInterrupt:  # perhaps in the middle of the message: the pipe cannot be used any more
            with self._lock:
                self._failure = RuntimeError("interrupted while sending a request; the engine is closed")
            self._ranks.close(grace=0.0)
            raise
        except Exception:
            self._reader.join(timeout=FAILURE_SECONDS)  # it learns what has happened to the ranks
            self.check()
            raise

    def _read(self) -> None:
        try:
            while True:
                self._sort(self._ranks.receive(0))
        except BaseException as error:
            with self._lock:
                if self._failure is None:
                    self._failure = RuntimeError("the engine was closed") if self._closed else error
                failure, inboxes = self._failure, set(self._inboxes.values())
                self._inboxes.clear()
            if not self._closed:
                self._ranks.close(grace=0.0)
            for inbox in inboxes:
                inbox.put(failure)

    def _sort(self, events: StepEvents) -> None:
        now = time.perf_counter()
        self.stats.append(events.stats)
        mail: dict[int, tuple[Inbox, list[int], list[int]]] = {}
        with self._lock:
            for entry, (ident, reason) in enumerate(zip(events.idents, events.reasons, strict=True)):
                inbox = self._inboxes.pop(ident, None) if reason else self._inboxes.get(ident)
                if inbox is not None:  # else cancelled meanwhile
                    mail.setdefault(id(inbox), (inbox, [], []))[1].append(entry)
            for ident in events.scores:
                if (inbox := self._inboxes.pop(ident, None)) is not None:
                    mail.setdefault(id(inbox), (inbox, [], []))[2].append(ident)
        for inbox, entries, scores in mail.values():
            inbox.put(Arrival(events, entries, scores, now))
