"""One rank's process as its caller holds it."""

import codecs
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection, wait
from typing import Any

from tokenweave.comm.collective import CommunicationError
from tokenweave.comm.links import Link
from tokenweave.comm.linux import pidfd

_TAIL_BYTES = 4096


class RankError(CommunicationError):
    """A rank ended before its function returned, or (as a cause) the traceback of the exception it raised.

    exit_code: negative for a signal, None if the rank raised an exception. stderr_tail: the last it wrote there.
    """

    def __init__(self, message: str, *, rank: int, exit_code: int | None = None, stderr_tail: str = "") -> None:
        super().__init__(message)
        self.rank, self.exit_code, self.stderr_tail = rank, exit_code, stderr_tail


def start(arguments: str, fds: list[int], stderr: int, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Run `worker` in a session of its own, so that Ctrl-C reaches only the caller. fds: handed down as they are."""
    command = [sys.executable, "-m", "tokenweave.comm.worker", arguments]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=stderr, pass_fds=fds, start_new_session=True, env=environment
    )


class RankProcess:
    """Starts one rank, and holds the caller's ends of its pipes."""

    def __init__(self, settings: dict[str, Any], peers: dict[int, Link], cores: list[int] | None) -> None:
        self.rank: int = settings["rank"]
        self.returned = False
        self.value: Any = None
        self._error: BaseException | None = None
        self._inbox: list[Any] = []
        self._link_open = True
        self.link, theirs = Link.pair()
        report_read, report_write = os.pipe()
        setup_read, self._setup = os.pipe()
        stderr_read, stderr_write = os.pipe()
        fds = {
            "link": theirs.fds, "report": report_write, "setup": setup_read,
            "peers": {rank: link.fds for rank, link in peers.items()},
        }  # fmt: skip
        handed_down = [settings["arena"], settings["store"], *theirs.fds, report_write, setup_read]
        handed_down += [fd for link in peers.values() for fd in link.fds]
        try:
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path),
                "OMP_NUM_THREADS": str(settings["threads"]),  # read when torch is imported
                **settings["environment"],
            }
            self.process = start(json.dumps({**settings, "fds": fds}), handed_down, stderr_write, environment)
        finally:
            theirs.close()
            for fd in (report_write, setup_read, stderr_write):
                os.close(fd)
        try:
            if cores:
                os.sched_setaffinity(self.process.pid, cores)  # long before it has threads
            self._end = pidfd(self.process.pid)
        except OSError:  # no such cores, or no descriptor left: nobody else knows of the rank yet
            self.process.kill()
            self.process.wait()
            raise
        self._report = Connection(report_read, writable=False)
        self._tail = bytearray()
        self._stderr_thread = threading.Thread(target=self._forward_stderr, args=(stderr_read,), daemon=True)
        self._stderr_thread.start()

    def send_setup(self, setup: bytes) -> None:
        """Hand over what to run, in the background: the rank reads it only after its imports."""

        def write(fd: int) -> None:
            try:
                with os.fdopen(fd, "wb") as pipe:
                    pipe.write(setup)
            except BrokenPipeError:
                pass  # the rank has died, which its descriptor tells

        threading.Thread(target=write, args=(self._setup,), daemon=True).start()

    def has_message(self) -> bool:
        """Whether `message` has something, without waiting. False once the rank has closed its end."""
        if not self._inbox and self._link_open and self.link.poll():
            try:
                self._inbox.append(self.link.recv())
            except (EOFError, OSError):
                self._link_open = False
        return bool(self._inbox)

    def message(self) -> Any:
        return self._inbox.pop()

    def sources(self, *, link: bool = False) -> list[Any]:
        """What to wait on for news from this rank: its report, its end and, if asked for, its messages."""
        news: list[Any] = []
        if not self.reported:
            news.append(self._report)
        if not self.ended:
            news.append(self._end)
        if link and self._link_open:
            news.append(self.link)
        return news

    @property
    def reported(self) -> bool:
        return self.returned or self._error is not None

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    @property
    def failure(self) -> BaseException | None:
        return self._error

    def update(self) -> None:
        """Take in, without waiting, a report or an end that has come."""
        ended = not self.ended and bool(wait([self._end], 0))
        if not self.reported and self._report.poll():
            self._read_report()
        if ended:
            self._reap()

    def close_link(self) -> None:
        """Tells the rank to end."""
        self.link.close()
        self._link_open = False

    def finish(self, deadline: float) -> None:
        """Wait for the process to end until `deadline` (of time.monotonic), taking in its report."""
        while not self.ended and (left := deadline - time.monotonic()) > 0:
            wait(self.sources(), left)
            self.update()

    def kill(self) -> None:
        """End the process and whatever it started; reap it; close every descriptor."""
        if not self.ended:
            self._reap()
        self._report.close()
        os.close(self._end)
        self._stderr_thread.join(timeout=1.0)

    def _reap(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # before it is reaped its number cannot be another's
        except ProcessLookupError:
            pass
        code = self.process.wait()
        if not self.reported:
            self._stderr_thread.join(timeout=1.0)
            self._error = self._death(code)

    def _death(self, code: int) -> RankError:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        tail = self._tail.decode(errors="replace").strip()
        message = f"rank {self.rank} {how} before its function returned"
        error = RankError(message, rank=self.rank, exit_code=code, stderr_tail=tail)
        if tail:
            error.add_note(f"the end of its stderr:\n{tail}")
        return error

    def _read_report(self) -> None:
        try:
            kind, payload, traceback = pickle.loads(self._report.recv_bytes())
        except (EOFError, OSError):
            return  # died while writing it, or before: the end of the process says so
        if kind == "returned":
            self.value, self.returned = pickle.loads(payload), True
            return
        cause = RankError(f"rank {self.rank} raised:\n{traceback}", rank=self.rank)
        try:
            error = pickle.loads(payload)
            error.add_note(f"raised on rank {self.rank}")
            error.__cause__ = cause
        except Exception:  # an exception that cannot travel
            error = cause
        self._error = error

    def _forward_stderr(self, fd: int) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with os.fdopen(fd, "rb", buffering=0) as pipe:
            while chunk := pipe.read(65536):
                self._tail += chunk
                del self._tail[:-_TAIL_BYTES]
                try:
                    sys.stderr.write(decoder.decode(chunk))
                    sys.stderr.flush()
                except (ValueError, OSError, AttributeError):
                    pass  # the caller has no stderr any more
