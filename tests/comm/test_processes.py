"""Long-lived ranks: messages, results, exceptions, deaths, and that nothing outlives its caller."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from test_failures import alive, wait_for

from tokenweave.comm import CommunicationError, Group, launch
from tokenweave.comm.links import Links
from tokenweave.comm.processes import RankError, start_ranks

pytestmark = pytest.mark.started


class Peculiar(Exception):
    def __init__(self, first: str, second: int) -> None:
        super().__init__(first, second)
        self.second = second


def converse(group: Group, links: Links, greeting: str) -> str:
    """Rank 0 passes what the caller says on to the others, and their answers back, until the caller closes."""
    if group.rank:
        try:
            while True:
                links.peers[0].send((group.rank, links.peers[0].recv()))
        except EOFError:
            return f"{greeting} from {group.rank}"
    try:
        while True:
            said = links.parent.recv()
            for link in links.peers.values():
                link.send(said)
            links.parent.send([link.recv() for link in links.peers.values()])
    except EOFError:
        return f"{greeting} from 0"


def test_messages_go_to_and_fro() -> None:
    with start_ranks("test_processes:converse", 3, ("hello",)) as ranks:
        assert not ranks.poll(0)
        for said in ("a", {"b": [1, 2]}, bytes(1_000_000), torch.arange(3)):
            ranks.send(0, said)
            answer = ranks.receive(0, timeout=30)
            assert [rank for rank, _ in answer] == [1, 2]
            assert all(torch.equal(s, said) if isinstance(s, torch.Tensor) else s == said for _, s in answer)
        with pytest.raises(TimeoutError):
            ranks.receive(0, timeout=0.05)
        assert not ranks.poll(0)
        pids = ranks.pids
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        ranks.send(0, "too late")
    ranks.close()


def speak_and_return(group: Group, links: Links) -> int:
    links.parent.send("last words")
    return group.rank * 10


def test_messages_before_the_end_still_come() -> None:
    with start_ranks(speak_and_return, 2) as ranks:
        assert ranks.results(timeout=30) == [0, 10]
        assert ranks.receive(1) == "last words"
        with pytest.raises(EOFError, match="rank 1 has closed"):
            ranks.receive(1)
        assert ranks.receive(0) == "last words"


def speak_and_die(group: Group, links: Links, how: str) -> None:
    if group.rank == 0:
        links.parent.send("last words")
        links.peers[1].send("spoken")
    else:
        links.peers[0].recv()
        if how == "raise":
            raise Peculiar("odd", 7)
        print("a complaint", file=sys.stderr, flush=True)
        os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGSEGV)
    links.parent.recv()


@pytest.mark.parametrize(
    "how, code, words", (("exit", 3, "ended with exit code 3"), ("crash", -11, "was killed by SIGSEGV"))
)
def test_a_death_is_told_with_its_stderr(how: str, code: int, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    with start_ranks(speak_and_die, 2, (how,)) as ranks:
        assert ranks.receive(0, timeout=30) == "last words"
        with pytest.raises(RankError, match=f"rank 1 {words} before its function returned") as caught:
            ranks.receive(0, timeout=30)
        assert isinstance(caught.value, CommunicationError)
        assert (caught.value.rank, caught.value.exit_code) == (1, code)
        assert str(caught.value).endswith("returned") and "a complaint" in caught.value.__notes__[0]
        with pytest.raises(RankError):  # and again at whatever comes next
            ranks.send(0, "anybody?")
    assert "a complaint" in capfd.readouterr().err


def test_an_exception_keeps_its_type() -> None:
    with start_ranks(speak_and_die, 2, ("raise",)) as ranks, pytest.raises(Peculiar) as caught:
        ranks.results(timeout=30)
    assert caught.value.second == 7
    assert "raised on rank 1" in caught.value.__notes__
    assert "speak_and_die" in str(caught.value.__cause__) and "rank 1" in str(caught.value.__cause__)


def raise_local(group: Group) -> None:
    class Local(ValueError):
        def __reduce__(self) -> str:
            raise TypeError("stays here")

    raise Local("cannot travel")


def test_an_exception_that_cannot_travel_is_told() -> None:
    with pytest.raises(RankError, match="rank 0 raised:(.|\n)*cannot travel"):
        launch(raise_local, 1)


def wait_for_peer(group: Group) -> None:
    with group.open_collective(64, 8) as c:
        if group.rank == 1:
            raise Peculiar("root", 1)
        c.barrier()


@pytest.mark.parametrize("collective", ("shared_memory", "distributed"))
def test_the_root_is_raised_not_its_echo(collective: str) -> None:
    with pytest.raises(Peculiar, match="root"):
        launch(wait_for_peer, 3, collective)


@pytest.mark.parametrize(
    "settings, words",
    (
        ({"size": 0}, "tensor_parallel_size must be at least 1, got 0"),
        ({"timeout": 0.0}, "timeout must be positive"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"collective": "telepathy"}, "auto, shared_memory, distributed, got 'telepathy'"),
        ({"device": "abacus"}, "'abacus'"),
        ({"size": 4096, "pin": True}, "cannot pin 4096 ranks"),
    ),
)
def test_settings_that_cannot_work_start_nothing(settings: dict[str, object], words: str) -> None:
    before = children()
    with pytest.raises(ValueError, match=re.escape(words)):
        start_ranks(converse, **{"size": 2, **settings})  # type: ignore[arg-type]
    assert children() == before


def test_what_cannot_be_sent_starts_nothing() -> None:
    before = children()
    with pytest.raises(TypeError):
        start_ranks(converse, 2, (socket.socket(),))
    assert children() == before


def surroundings(group: Group) -> dict[str, object]:
    with group.open_collective(64, 1024, lanes=2) as c:
        c.all_reduce(torch.ones(1024, 64))
        c.barrier()
        found = {
            "threads": torch.get_num_threads(), "cores": sorted(os.sched_getaffinity(0)), "shm": os.listdir("/dev/shm"),
            "listening": listening(), "gloo": os.environ.get("GLOO_SOCKET_IFNAME"), "path": sys.path,
            "session": os.getsid(0) == os.getpid(),
        }  # fmt: skip
        c.barrier()
        return found


@pytest.mark.parametrize("collective", ("shared_memory", "distributed"))
def test_surroundings_of_a_rank(collective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets only on loopback, and none at all in shared memory, which leaves no names in /dev/shm."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # as for ranks on several hosts
    before = os.listdir("/dev/shm")
    for found in launch(surroundings, 2, collective, threads=3):
        assert found["threads"] == 3
        assert found["session"]
        assert found["path"] == [os.path.abspath(p) for p in sys.path]
        addresses = found["listening"]
        assert isinstance(addresses, list)
        assert all(address == "127.0.0.1" for address in addresses)
        assert bool(addresses) == (collective == "distributed")
        # Without it gloo listens on whatever address the host's name means.
        assert found["gloo"] == ("lo" if collective == "distributed" else "eth0")
        assert set(found["shm"]) <= set(before)  # type: ignore[call-overload]
    assert os.listdir("/dev/shm") == before


def variables(group: Group, links: Links) -> list[str | None]:
    return [os.environ.get(name) for name in ("RANKS_OWN", "OF_BOTH", "CALLERS")]


def test_variables_of_the_ranks_go_over_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_BOTH", "caller")
    monkeypatch.setenv("CALLERS", "caller")
    with start_ranks(variables, 2, environment={"RANKS_OWN": "rank", "OF_BOTH": "rank"}) as ranks:
        assert ranks.results() == [["rank", "rank", "caller"]] * 2


def test_ranks_are_pinned_to_cores_of_their_own() -> None:
    cores = os.sched_getaffinity(0)
    size = min(2, len(cores))
    found = [set(rank["cores"]) for rank in launch(surroundings, size, pin=True)]
    assert set().union(*found) == cores and sum(map(len, found)) == len(cores)


def listening() -> list[str]:
    """Addresses that this process listens on."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    addresses = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                packed = bytes.fromhex(fields[1].split(":")[0])
                words = [packed[i : i + 4][::-1] for i in range(0, len(packed), 4)]  # the host's byte order
                addresses.append(socket.inet_ntop(family, b"".join(words)))
    return addresses


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


CALLER = """
    import os, pathlib, sys, time
    from tokenweave.comm import launch

    def work(group, directory):
        with group.open_collective(64, 8) as c:
            c.barrier()
            path = pathlib.Path(directory, f".{group.rank}")
            path.write_text(str(os.getpid()))
            path.rename(pathlib.Path(directory, str(group.rank)))
            if group.rank == 1:
                time.sleep(60)
            c.barrier()

    launch(work, 2, sys.argv[2], args=(sys.argv[1],))
"""


@pytest.mark.parametrize(
    "sign, collective",
    (
        (signal.SIGKILL, "shared_memory"),
        (signal.SIGKILL, "distributed"),
        (signal.SIGINT, "shared_memory"),
        (signal.SIGTERM, "shared_memory"),
    ),
)
def test_ranks_end_with_their_caller(tmp_path: Path, sign: signal.Signals, collective: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(CALLER))
    caller = subprocess.Popen([sys.executable, script, tmp_path, collective], stderr=subprocess.PIPE, text=True)
    pids = [int(wait_for(tmp_path / str(rank))) for rank in range(2)]
    caller.send_signal(sign)
    _, errors = caller.communicate(timeout=10)
    deadline = time.monotonic() + 3
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived its caller"
        time.sleep(0.01)
    if sign == signal.SIGINT:
        assert "KeyboardInterrupt" in errors


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from tokenweave.comm import launch\nnumber = 5\nprint(launch(lambda group: group.rank + number, 2))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[5, 6]\n", "")
