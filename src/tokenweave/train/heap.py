"""How a training rank's heap is to behave: settings that glibc reads when the process starts."""

import os

from tokenweave.plan.training import SYSTEM_BLOCK

# Blocks of 4 MB and more are mapped one by one and go back to the system when they are freed. glibc raises that border
# to 32 MB by itself, which takes up to 10 % more memory at the peak; from 1 MB on it is up to 9 % less, but the system
# clears more pages, and steps take up to 1.6 times as long. The heap of smaller blocks is kept from step to step: given
# back whenever 128 KB are free at its end, it makes the steps of a small model take 1.7 times as long.
# Tensors are aligned to 64 bytes: glibc takes 96 more than asked for and gives back what is over at both ends. Kept in
# caches for small blocks (tcache, fast bins) those ends do not join what is freed between them, so that a freed block
# is too small for the next of the same size: gaps of 20 to 25 MB beside 75 MB in use, which grew for hundreds of steps.
# Without these caches they are 3 to 5 MB after any number of steps, and a step takes no longer.
_HEAP = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in (
        ("mmap_threshold", SYSTEM_BLOCK), ("trim_threshold", 1 << 30), ("tcache_count", 0), ("mxfast", 0),
    )
)  # fmt: skip


def heap_settings() -> dict[str, str]:
    """Variables for the environment of a rank that trains. What the caller has set wins: it comes last."""
    own = os.environ.get("GLIBC_TUNABLES")
    return {"GLIBC_TUNABLES": f"{_HEAP}:{own}" if own else _HEAP}
