"""The thread of a rank that sees its caller and its peers die."""

import os
import select
import signal
import threading
from collections.abc import Callable

from tokenweave.comm.linux import pidfd

_PARENT_CHECK_MS = 500


def watch(parent: int | None, peers: dict[int, int], on_death: Callable[[int], None]) -> None:
    """Start it. parent: pid; when it ends this process and all it started are killed; None if the parent sees to that
    itself. peers: rank -> pid; when one ends on_death(rank) is called.

    Not PR_SET_PDEATHSIG: that fires when the parent's *thread* that started this process ends.
    """
    poll = select.poll()
    ranks: dict[int, int] = {}
    for rank, pid in peers.items():
        try:
            fd = pidfd(pid)
        except ProcessLookupError:
            on_death(rank)
            continue
        ranks[fd] = rank
        poll.register(fd, select.POLLIN)
    try:
        if parent is not None:
            poll.register(pidfd(parent), select.POLLIN)
    except ProcessLookupError:
        pass  # the loop below sees it

    def loop() -> None:
        while parent is not None or ranks:
            ready = poll.poll(_PARENT_CHECK_MS if parent is not None else None)
            if parent is not None and os.getppid() != parent:
                os.killpg(0, signal.SIGKILL)  # this process leads the group
            for fd, _ in ready:
                if fd in ranks:
                    on_death(ranks.pop(fd))
                    poll.unregister(fd)
                    os.close(fd)

    threading.Thread(target=loop, name="tokenweave-watch", daemon=True).start()
