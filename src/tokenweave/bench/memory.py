"""What bounds decoding: how fast cores read memory, one alone and all at once.

Virtual cores may sit on one chiplet or on two, which the system does not tell and the host may change: on one machine
two cores together read 46 GB/s one hour and 82 the next, and one alone 41 both times.
"""

import os
import statistics
import time

import numpy as np
from numba import njit

from tokenweave.comm import Group, launch

WORDS = 16 << 20  # int64: 128 MiB, beyond any cache
REPEATS = 7


@njit(nogil=True)
def _read(words):  # type: ignore[no-untyped-def]
    total = 0
    for i in range(words.shape[0]):
        total += words[i]
    return total


def read_bandwidth() -> tuple[int, float, float]:
    """Number of cores, and GB/s that a core reads alone and while all others read too; medians, the slowest core."""
    cores = len(os.sched_getaffinity(0))
    alone, together = zip(*launch(_measure, cores, threads=1, pin=True), strict=True)
    return cores, min(alone), min(together)


def _measure(group: Group) -> tuple[float, float]:
    words = np.ones(WORDS, np.int64)
    _read(words)
    with group.open_collective(1, 1) as collective:
        alone = 0.0
        for rank in range(group.size):
            collective.barrier()
            if rank == group.rank:
                alone = _gigabytes(words)
        collective.barrier()
        return alone, _gigabytes(words)


def _gigabytes(words: np.ndarray) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        _read(words)
        seconds.append(time.perf_counter() - start)
    return words.nbytes / statistics.median(seconds) / 1e9
