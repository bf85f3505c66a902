"""Has the kernels ready before a request waits for them, and says so where that takes long."""

import sys
import threading

import torch

from tokenweave.layers.kernels.warm_up import warm_up

NOTICE_SECONDS = 2.0  # reading kept kernels takes a quarter of a second


def prepare_kernels(dtype: torch.dtype, rank: int) -> None:
    """Compile or read the layers' kernels. Nothing is communicated, so ranks may take unlike long without a deadline.

    Rank 0 tells the user on stderr if it takes long, which it does once on a machine and dtype.
    """
    text = ["compiling the CPU kernels, once on this machine ..."]
    notice = threading.Timer(NOTICE_SECONDS, print, text, {"file": sys.stderr, "flush": True})
    if rank == 0:
        notice.start()
    try:
        warm_up(dtype)
    finally:
        notice.cancel()
