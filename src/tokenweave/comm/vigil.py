"""The thread of a rank that sees an operation on the GPU not come to its end, and finds out why.

NCCL waits for a rank that does not come for as long as the process lives, and says nothing of it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum

import numpy as np

from tokenweave.comm.control import DEAD, LATE, MISMATCH
from tokenweave.comm.operations import describe, explain
from tokenweave.comm.streams import StreamError, Streams
from tokenweave.comm.world import World

_TICK = 0.1  # seconds between two looks
_GRACE = 0.3  # seconds that an operation may still take after the connection to a peer has ended
_ANSWER_SECONDS = 1.0  # what a rank that is there may take to say how far it has come
# Between the end of the connections and the abort: kernels that are aborted still send, and what they send is garbage.
# By then peers know not to take it.
_NOTICE_SECONDS = 0.05
_FAREWELL_SECONDS = 1.0  # how long a rank that is done waits for those that are not
_ASK, _ANSWER, _LAUNCHED, _BYE = 1, 2, 3, 4


class Progress(IntEnum):
    """Words of a lane, 64 bits each: how many operations have begun and how many are done, and of the last begun what
    it is (see `operations`)."""

    BEGUN = 0
    CODE = 1
    ROWS = 2
    COLUMNS = 3
    DONE = 4


PROGRESS_WORDS = 8  # lanes begin at multiples of 64 bytes


class Vigil:
    """Ends the group when an operation has been under way for longer than the timeout, or when it is and a peer has
    gone or was done before it, or when ranks have launched unlike operations. Then, the account being there, it calls
    `abort`, which must end what waits on the GPU.

    progress: int64 [lanes, PROGRESS_WORDS], written by the GPU. Who is late is who has begun fewer operations on the
    lane, or does not answer. What ranks launch they tell each other a tick later; what they replay is compared only
    where they wait in it. streams: to every peer, for this thread alone.
    """

    def __init__(
        self, world: World, streams: Streams, progress: np.ndarray, timeout: float, abort: Callable[[], None]
    ) -> None:
        self._world, self._streams, self._progress, self._timeout = world, streams, progress, timeout
        self._abort = abort
        self._peers = [peer for peer in range(world.size) if peer != world.rank]
        self._gone: dict[int, float] = {}  # when their connections ended
        self._left: dict[int, np.ndarray] = {}  # how far those had come that were done, and said so
        self._since = [(0, 0.0)] * len(progress)  # the operation seen under way on each lane, and when first
        self._answers: dict[int, np.ndarray] = {}
        self._launched: deque[tuple[int, ...]] = deque()  # and not told yet
        pairs = [(peer, lane) for peer in self._peers for lane in range(len(progress))]
        self._ours: dict[tuple[int, int], deque[list[int]]] = {pair: deque() for pair in pairs}  # not compared yet
        self._theirs: dict[tuple[int, int], deque[list[int]]] = {pair: deque() for pair in pairs}
        self._stopped = threading.Event()
        self._farewell: float | None = None  # until when this rank waits, being done
        self._thread = threading.Thread(target=self._run, name="tokenweave-vigil", daemon=True)
        self._thread.start()

    def launched(self, lane: int, words: tuple[int, int, int]) -> None:
        """This rank has launched an operation, words being what it is."""
        self._launched.append((lane, *words))

    def stop(self) -> None:
        """This rank is done, with what it has launched too, and tells its peers. Waits for those that are not, for a
        short time: what it has sent may still be on its way to them."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._world.ended is None and not self._parted():
                self._listen(_TICK)
                if self._gone:
                    self._world.look()
                self._tell_launched()
                self._compare()
                for lane in range(len(self._progress)):
                    self._look(lane)
        finally:
            self._streams.close()
        if self._world.ended is not None:
            time.sleep(_NOTICE_SECONDS)
            self._abort()

    def _parted(self) -> bool:
        if not self._stopped.is_set():
            return False
        if self._farewell is None:
            self._farewell = time.monotonic() + _FAREWELL_SECONDS
            self._tell_launched()
            for peer in self._peers:
                self._tell(peer, _BYE, self._progress)
        return not self._awaited() or time.monotonic() > self._farewell

    def _awaited(self) -> list[int]:
        """Peers that may still say something."""
        return [peer for peer in self._peers if peer not in self._gone and peer not in self._left]

    def _listen(self, seconds: float) -> None:
        """Answer peers that ask, take in what they tell, see who has gone."""
        awaited = self._awaited()
        if not awaited:
            time.sleep(seconds)
            return
        try:
            ready = self._streams.ready(awaited, seconds)
        except StreamError as error:  # what was posted does not go out
            self._streams.forget(error.peer)
            return
        for peer in ready:
            try:
                self._take(peer, *self._received(peer))
            except StreamError:  # gone, or it does not send what it has begun to
                self._gone[peer] = time.monotonic()
                self._streams.forget(peer)

    def _take(self, peer: int, kind: int, words: np.ndarray) -> None:
        if kind == _ASK:
            self._tell(peer, _ANSWER, self._progress)
        elif kind == _LAUNCHED:
            for lane, *operation in words.reshape(-1, 4).tolist():
                self._theirs[peer, lane].append(operation)
        else:
            self._answers[peer] = words.reshape(self._progress.shape)
            if kind == _BYE:
                self._left[peer] = self._answers[peer]

    def _received(self, peer: int) -> tuple[int, np.ndarray]:
        deadline, head = time.monotonic() + _ANSWER_SECONDS, np.empty(2, dtype=np.int64)
        self._streams.receive({peer: head.data.cast("B")}, deadline)
        words = np.empty(int(head[1]) // 8, dtype=np.int64)
        if words.size:
            self._streams.receive({peer: words.data.cast("B")}, deadline)
        return int(head[0]), words

    def _tell(self, peer: int, kind: int, words: np.ndarray | None = None) -> None:
        body = b"" if words is None else words.tobytes()
        try:
            self._streams.post(peer, memoryview(np.array([kind, len(body)]).tobytes() + body))
        except StreamError:  # what it said before it went is still to be read
            self._streams.forget(peer)

    def _tell_launched(self) -> None:
        if fresh := [self._launched.popleft() for _ in range(len(self._launched))]:
            for (peer, lane), ours in self._ours.items():
                if peer not in self._gone:
                    ours.extend(operation for number, *operation in fresh if number == lane)
            for peer in self._awaited():
                self._tell(peer, _LAUNCHED, np.array(fresh, dtype=np.int64))

    def _compare(self) -> None:
        for (peer, lane), theirs in self._theirs.items():
            ours = self._ours[peer, lane]
            while theirs and ours and self._world.ended is None:
                if (mine := ours.popleft()) != (brought := theirs.popleft()):
                    self._end([MISMATCH, peer, lane, *mine, *brought])

    def _look(self, lane: int) -> None:
        words = self._progress[lane].copy()
        begun, now = int(words[Progress.BEGUN]), time.monotonic()
        if begun == words[Progress.DONE]:
            self._since[lane] = (0, now)
        elif self._since[lane][0] != begun:
            self._since[lane] = (begun, now)
        elif early := [peer for peer, last in self._left.items() if last[lane, Progress.BEGUN] < begun]:
            what = f"{describe(_operation(words))} on lane {lane}"
            account = f"rank {early[0]} has closed the collective; rank {self._world.rank} waits for it in {what}"
            self._world.end(account, wait=False)
        elif self._gone and now - max(self._since[lane][1], min(self._gone.values())) > _GRACE:
            self._end([DEAD, min(self._gone, key=self._gone.__getitem__), lane, *_operation(words), 0, 0, 0])
        elif now - self._since[lane][1] > self._timeout:
            self._inquire(lane, words)

    def _inquire(self, lane: int, words: np.ndarray) -> None:
        """Ask the peers how far they have come, and end the group unless the operation is done after all."""
        self._answers = dict(self._left)
        for peer in self._awaited():
            self._tell(peer, _ASK)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not self._gone and len(self._answers) < len(self._peers) and time.monotonic() < deadline:
            self._listen(0.02)
        if self._gone or self._progress[lane, Progress.DONE] == words[Progress.BEGUN]:
            return  # the next look sees to it
        silent = [peer for peer in self._peers if peer not in self._answers]
        theirs = {peer: answer[lane] for peer, answer in self._answers.items()}
        behind = sorted(theirs, key=lambda peer: theirs[peer][Progress.BEGUN])
        mine = _operation(words)
        if silent or theirs[behind[0]][Progress.BEGUN] < words[Progress.BEGUN]:
            self._end([LATE, (silent or behind)[0], lane, *mine, 0, 0, 0])
            return
        for peer, answer in theirs.items():
            if answer[Progress.BEGUN] == words[Progress.BEGUN] and _operation(answer) != mine:
                self._end([MISMATCH, peer, lane, *mine, *_operation(answer)])
                return
        self._world.end(
            f"rank {self._world.rank}: {describe(mine)} on lane {lane} did not end within {self._timeout:g} s, though "
            "every rank came to it",
            wait=False,
        )

    def _end(self, finding: list[int]) -> None:
        self._world.end(explain([self._world.rank, *finding], self._timeout), wait=finding[0] == DEAD)


def _operation(words: np.ndarray) -> list[int]:
    return [int(word) for word in words[Progress.CODE : Progress.COLUMNS + 1]]
