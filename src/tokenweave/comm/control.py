"""The first page of the memory that all ranks of a host share: why the group has ended, and who has died.

The memory is a file of ARENA_BYTES, sparse: this page, then the segments of every collective in the order they were
opened. It is handed down as a descriptor and has no name, so that nothing is left when the last rank has ended.
"""

import mmap

import numpy as np

ARENA_BYTES = 1 << 44
MAX_RANKS = 128

# Words of the page, as byte offsets. ABORT: 0, or 1 + the rank that ended the group; the first to write wins. DEATH: 0,
# or 1 + the first rank seen to have died. From FINDINGS a line per rank in which it writes what it found wrong, before
# it writes ABORT: reason, peer, lane, then code, rows and columns of its own operation and of the peer's.
ABORT, DEATH, FINDINGS, FINDING_BYTES = 0, 64, 128, 128
CONTROL_BYTES = 8 * mmap.ALLOCATIONGRANULARITY

LATE, DEAD, MISMATCH = 1, 2, 3


class Control:
    """This process's view of the page. `arena`: the descriptor, which stays the caller's."""

    def __init__(self, arena: int) -> None:
        self.arena = arena
        self._words = np.frombuffer(mmap.mmap(arena, CONTROL_BYTES), dtype=np.int64)

    @property
    def address(self) -> int:
        return self._words.ctypes.data

    def mark_dead(self, rank: int) -> None:
        """Make every wait for a peer fail from now on, unless the peer has already arrived."""
        if not self._words[DEATH // 8]:
            self._words[DEATH // 8] = 1 + rank

    @property
    def ended(self) -> bool:
        """Whether a wait has failed, and the group with it."""
        return bool(self._words[ABORT // 8])

    @property
    def finding(self) -> list[int]:
        """The rank that ended the group, and the nine words of what it found; only once a wait has failed."""
        reporter = int(self._words[ABORT // 8])
        start = (FINDINGS + (reporter - 1) * FINDING_BYTES) // 8
        return [reporter - 1, *self._words[start : start + 9].tolist()]
