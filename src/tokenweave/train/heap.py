"""How a training rank's heap is to behave: settings that glibc reads when the process starts."""

import os

from tokenweave.plan.training import SYSTEM_BLOCK

# Blocks of 1 MB and more are mapped one by one, so that they go back to the system when they are freed; left to itself
# glibc raises that border to 32 MB, and the process grew 20 to 40 % more.
# Tensors are aligned to 64 bytes: glibc takes 96 more than asked for and gives back what is over at both ends. Kept in
# caches for small blocks (tcache, fast bins) those ends never join what is freed between them, so that a freed block
# is too small for the next of the same size: gaps of 20 to 25 MB beside 75 MB in use, which grew for hundreds of steps.
# Without these caches 3 to 5, and a step takes as long.
_HEAP = f"glibc.malloc.mmap_threshold={SYSTEM_BLOCK}:glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"


def heap_settings() -> dict[str, str]:
    """Variables for the environment of a rank that trains. What the caller has set wins: it comes last."""
    own = os.environ.get("GLIBC_TUNABLES")
    return {"GLIBC_TUNABLES": f"{_HEAP}:{own}" if own else _HEAP}
