"""A process that is told when its peers end, and left alone by the end of whoever started it."""

import subprocess
import sys
import threading
import time

from tokenweave.comm.watch import watch


def test_without_a_parent_only_peers_are_watched() -> None:
    peers = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    try:
        dead: list[int] = []
        seen = threading.Event()

        def on_death(rank: int) -> None:
            dead.append(rank)
            seen.set()

        watch(None, {1: peers[0].pid, 3: peers[1].pid}, on_death)
        time.sleep(0.2)
        assert dead == []
        peers[1].kill()
        assert seen.wait(2.0) and dead == [3]
        seen.clear()
        peers[0].kill()
        assert seen.wait(2.0) and dead == [3, 1]
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()


def test_a_peer_that_has_gone_before() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead: list[int] = []
    watch(None, {2: gone.pid}, dead.append)
    assert dead == [2]
