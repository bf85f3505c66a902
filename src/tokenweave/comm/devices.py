"""Which GPU a rank computes on."""

import os
import sys

import torch

_SHARED = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def claim(rank: int, size: int) -> torch.device:
    """This rank's GPU, made the current one. Where ranks outnumber the GPUs of the host they share them, in turns: good
    for tests alone, which rank 0 says on stderr.

    Raises ValueError if there is no GPU that torch can use.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ValueError("device 'cuda' needs a GPU that torch can use; there is none")
    if size > count:
        os.environ.update(_SHARED)
        if rank == 0:
            print(
                f"tokenweave: {size} ranks share {count} GPU{'s' * (count > 1)} and take turns on it: right, but slow",
                file=sys.stderr,
            )
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    return device
