"""How little a training rank is to hold beside its tensors: settings that are read when the process starts."""

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


# oneDNN keeps what it compiles for bfloat16 products, and torch keeps the same again: for a mixture of experts, which
# brings other numbers of rows at every step, 130 to 160 MB beside 376 planned. With 48 of them kept once a step takes a
# tenth longer (with 32 a third); a decoder without experts has three dozen.
_PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "48", "LRU_CACHE_CAPACITY": "1"}


def memory_settings(dtype: str) -> dict[str, str]:
    """Variables for the environment of a rank that trains weights of `dtype` on a CPU. What the caller has set wins: of
    glibc's settings the last counts."""
    own = os.environ.get("GLIBC_TUNABLES")
    products = _PRODUCTS if dtype == "bfloat16" else {}
    kept = {name: os.environ.get(name, value) for name, value in products.items()}
    return {"GLIBC_TUNABLES": f"{_HEAP}:{own}" if own else _HEAP} | kept
