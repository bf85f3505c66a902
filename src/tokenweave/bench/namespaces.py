"""Two ranks on two hosts, on one machine: each in a network namespace and on a core of its own, a slow link between.

The namespaces have no names: they are those of the rank processes and go with them, whatever ends them, and the link
goes with the namespaces. The ranks end when their standard input does, so that nothing is left even of a killed parent.
"""

import json
import os
import select
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

LINK = "weave0"  # the interface, in both namespaces
ADDRESSES = ("10.98.76.1", "10.98.76.2")
PORT = "29555"  # taken in a namespace that nothing else is in
# The bucket holds one packet of the largest size the network stack hands over (65536 bytes and headers) and no more:
# what it holds passes at once, and a message should not.
BUCKET = 70_000
QUEUE = 16 << 20  # bytes waiting at the link; more than two lanes' messages, so that nothing is dropped
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_END_SECONDS = 5.0
_ANSWER_SECONDS = 600.0  # a question may be many rounds of a long prefill over a slow link


class NetworkRanks:
    """Two ranks that answer JSON lines, joined by a link whose rate can be changed. A context manager.

    program: the module each rank runs, with `settings` as JSON in its arguments. Rank r has the r-th usable core.
    Raises ValueError where the machine cannot do it, RuntimeError if a rank ends.
    """

    def __init__(self, program: str, settings: dict[str, Any]) -> None:
        _check_machine()
        self._ranks: list[subprocess.Popen[str]] = []
        try:
            cores = sorted(os.sched_getaffinity(0))[: len(ADDRESSES)]
            for rank, core in enumerate(cores):
                self._ranks.append(self._start(program, settings, rank, core))
            for rank in range(len(ADDRESSES)):
                self._receive(rank)  # it runs, in its namespace
            self._link()
        except BaseException:
            self.close()
            raise

    def set_rate(self, bits_per_second: float) -> None:
        """How fast bytes leave each rank."""
        rate = ["rate", f"{bits_per_second:.0f}bit", "burst", str(BUCKET), "limit", str(QUEUE)]
        for rank in range(len(ADDRESSES)):
            self._inside(rank, "tc", "qdisc", "replace", "dev", LINK, "root", "tbf", *rate)

    def ask(self, question: Any) -> list[Any]:
        """Both ranks' answers to a question, in rank order."""
        for rank, process in enumerate(self._ranks):
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                self._fail(rank)
        return [self._receive(rank) for rank in range(len(self._ranks))]

    def close(self) -> None:
        """End the ranks, and with them namespaces and link. Never raises."""
        for process in self._ranks:
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
        for process in self._ranks:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._ranks = []

    def __enter__(self) -> "NetworkRanks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._ranks]

    def _start(self, program: str, settings: dict[str, Any], rank: int, core: int) -> "subprocess.Popen[str]":
        joining = {
            "RANK": str(rank), "WORLD_SIZE": str(len(ADDRESSES)), "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": LINK,
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # or torch warns that nobody knows the addresses' names
        }  # fmt: skip
        words = [sys.executable, "-m", program, json.dumps(settings | {"core": core})]
        return subprocess.Popen(
            ["unshare", "--net", *words],  # replaces itself: the process is the rank
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | joining | {"OMP_NUM_THREADS": "1"},
        )

    def _link(self) -> None:
        first, second = self.pids
        _run("ip", "link", "add", LINK, "netns", str(first), "type", "veth", "peer", "name", LINK, "netns", str(second))
        for rank, address in enumerate(ADDRESSES):
            self._inside(rank, "ip", "link", "set", "lo", "up")
            self._inside(rank, "ip", "address", "add", f"{address}/30", "dev", LINK)
            self._inside(rank, "ip", "link", "set", LINK, "up")

    def _inside(self, rank: int, *words: str) -> None:
        _run("nsenter", "--target", str(self._ranks[rank].pid), "--net", *words)

    def _receive(self, rank: int) -> Any:
        stdout = self._ranks[rank].stdout
        assert stdout is not None
        if not select.select([stdout], [], [], _ANSWER_SECONDS)[0]:
            raise RuntimeError(f"rank {rank} has not answered for {_ANSWER_SECONDS:.0f} s")
        line = stdout.readline()
        if not line:
            self._fail(rank)
        return json.loads(line)

    def _fail(self, rank: int) -> None:
        try:
            code = self._ranks[rank].wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"rank {rank} has closed its output and goes on; what it said is above") from None
        raise RuntimeError(f"rank {rank} has ended with exit code {code}; what it said is above")


def _check_machine() -> None:
    missing = sorted({package for tool, package in _TOOLS.items() if not shutil.which(tool)})
    if missing:
        raise ValueError(f"network namespaces need {' and '.join(missing)}; install the packages of these names")
    if os.geteuid() != 0:
        raise ValueError("network namespaces need root")
    if len(os.sched_getaffinity(0)) < len(ADDRESSES):
        raise ValueError(f"{len(ADDRESSES)} ranks need a core each, and there is one")
    if not Path("/proc/self/ns/net").exists():
        raise ValueError("this system has no network namespaces")


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
