"""Ranks forked from one process that has imported, once for all tests, what ranks import.

A rank that is started as users start it takes 1.2 s of a processor before its first line, a forked one 0.02 s. What it
then runs is the same code in a process of its own, with the same descriptors, environment and session. Other than that,
its parent is the process here, and what libraries read from the environment when they are imported is not the test's.
Tests of how ranks start, end and use memory start them as users do: see `started` in conftest.py.
"""

import fcntl
import gc
import json
import os
import socket
import subprocess
import sys
import threading
from typing import Any

from tokenweave.comm import rank_process

AS_USERS_DO = rank_process.start
_MESSAGE_BYTES, _MOST_FDS = 1 << 17, 250
_PARKED = 512  # descriptors from here on are in nobody's way


class ForkedRank:
    """What RankProcess uses of a Popen."""

    def __init__(self, starter: "Starter", pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._starter = starter

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = self._starter.ask({"wait": self.pid}, [])
        return self.returncode


class Starter:
    """The caller's end. The process behind it is started with the first rank and ends with the caller."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self._lock = threading.Lock()  # several threads may end ranks at once

    def start(self, arguments: str, fds: list[int], stderr: int, environment: dict[str, str]) -> Any:
        """In the place of `tokenweave.comm.rank_process.start`."""
        with open(os.devnull) as nothing:
            places = {0: nothing.fileno(), 1: 1, 2: stderr} | {fd: fd for fd in fds}
            asked = {
                "arguments": arguments, "places": list(places), "environment": environment, "directory": os.getcwd(),
            }  # fmt: skip
            return ForkedRank(self, self.ask(asked, list(places.values())))

    def ask(self, message: dict[str, Any], fds: list[int]) -> int:
        with self._lock:
            if self._channel is None:
                self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    subprocess.Popen(
                        [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                        start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
                    )  # fmt: skip
            socket.send_fds(self._channel, [json.dumps(message).encode()], fds)
            answer = self._channel.recv(_MESSAGE_BYTES)
            if not answer:
                raise RuntimeError("the process that forks ranks has died")
            return int(answer)


def serve(channel: socket.socket) -> None:
    """Fork and reap ranks until the caller has gone. Returns in a rank too, once it is set up."""
    import torch

    import tokenweave.comm.distributed
    import tokenweave.engine.worker
    import tokenweave.train.worker  # noqa: F401
    from tokenweave.comm import worker
    from tokenweave.comm.local import compiled_combine
    from tokenweave.comm.shared_memory import _compiled
    from tokenweave.layers.kernels.warm_up import warm_up

    torch.set_num_threads(1)
    for dtype in ("float32", "bfloat16"):  # the kernels of most tests
        warm_up(getattr(torch, dtype))
        _compiled(dtype)
        compiled_combine(dtype)
    gc.collect()
    gc.freeze()  # so that ranks do not copy these pages to look for garbage
    while True:
        message, fds, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, _MOST_FDS)
        if not message:
            return
        asked = json.loads(message)
        if "wait" in asked:
            status = os.waitpid(asked["wait"], 0)[1]
            channel.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
        if os.fork() == 0:
            become_rank(channel, asked, fds)
            return worker.main()
        for fd in fds:
            os.close(fd)


def become_rank(channel: socket.socket, asked: dict[str, Any], fds: list[int]) -> None:
    """Take the descriptors to the numbers they have in the arguments, and the caller's environment and directory."""
    os.setsid()
    channel.send(str(os.getpid()).encode())
    channel.close()
    parked = [fcntl.fcntl(fd, fcntl.F_DUPFD, _PARKED) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, place in zip(parked, asked["places"], strict=True):
        os.dup2(fd, place)
        os.close(fd)
    os.chdir(asked["directory"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = ["tokenweave.comm.worker", json.dumps(json.loads(asked["arguments"]) | {"parent": os.getppid()})]


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
