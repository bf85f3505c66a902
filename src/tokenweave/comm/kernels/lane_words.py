"""The words of a lane in GPU memory, as the kernels of `rows.cuh` read them: 64 bits each."""

from enum import IntEnum

from tokenweave.comm.control import MAX_RANKS


class LaneWord(IntEnum):
    """RANK to MULTICAST are set when the lane is opened. EPOCH, FINISHED and FAILED belong to the kernels.

    TIMEOUT: nanoseconds. PAGE: the control page, mapped for the GPU. MULTICAST: the address of the lane's buffer on all
    ranks at once, 0 without; of an emulated lane, how many rows go in and out for each row of this rank.
    SOURCES, TARGETS, FLAGS: tables with an address for each rank, of buffers to read and to write and of flags.
    """

    RANK = 0
    SIZE = 1
    LANE = 2
    TIMEOUT = 3
    PAGE = 4
    MULTICAST = 5
    EPOCH = 8
    FINISHED = 9
    FAILED = 10
    SOURCES = 16
    TARGETS = SOURCES + MAX_RANKS
    FLAGS = TARGETS + MAX_RANKS


LANE_WORDS = LaneWord.FLAGS + MAX_RANKS
FLAG_WORDS = 2  # per peer and lane: it has come, it is through
