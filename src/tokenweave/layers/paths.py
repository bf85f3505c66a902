"""When a layer's work goes to the kernels of this package and when to torch's operators.

Kernel / torch 2.13, µs, for a [640, 576] matrix that is not in its own caches; one core of an AMD EPYC (Zen 5), and the
same held to AVX2:

    rows                1          4          16          64           512
    bfloat16            18 / 59    14 / 62    32 / 52     114 / 120   804 / 809
    float32             30 / 91    41 / 128   105 / 205   331 / 541    2400 / 3530
    float16             16 / 31    20 / 121   66 / 480    263 / 1936   2050 / 15115
    bfloat16, AVX2      18 / 32    47 / 119   184 / 476   701 / 1906
    float32, AVX2       39 / 86    53 / 129   205 / 205   799 / 516

bfloat16 with AVX-512 but without its bfloat16 products takes 160 at 64 rows and 1070 at 512, by kernel.
A kernel uses one core, torch its threads: with two it catches up at 16 rows, with more at once or soon after.
"""

import torch

from tokenweave.layers.kernels import pairs
from tokenweave.layers.kernels.views import STORED

ALL = 1 << 62
LEAST_KEYS = 16  # that the attention kernel reads at once
_WIDE = torch.backends.cpu.get_cpu_capability() == "AVX512"
# the most rows that kernels multiply where torch has 1, 2 and more threads
MOST_ROWS = {
    torch.bfloat16: (48 if _WIDE and not pairs.available() else ALL, 16, 4),
    torch.float32: (ALL if _WIDE else 16, 16, 4),
    torch.float16: (ALL, ALL, ALL),  # torch has no fast path for it
}


def uses_kernels(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None = None) -> bool:
    """Whether kernels can multiply x by `weight`: CPU memory, one type, contiguous rows that fit, no gradients wanted.

    out: where given, must be like x. What the kernels cannot take goes to torch, which does it or says what is wrong.
    """
    return (
        x.is_cpu
        and x.dtype == weight.dtype
        and x.dtype in STORED
        and not torch.is_grad_enabled()
        and x.is_contiguous()
        and x.shape[1] == weight.shape[1]
        and (out is None or (out.is_cpu and out.dtype == x.dtype and out.shape == x.shape and out.is_contiguous()))
    )


def kernel_multiplies(rows: int, dtype: torch.dtype) -> bool:
    """Whether so many rows are multiplied by a weight matrix in a kernel rather than by torch."""
    return rows <= MOST_ROWS[dtype][min(torch.get_num_threads(), 3) - 1]


def uses_gpu_kernels(x: torch.Tensor) -> bool:
    """Whether x is work for the GPU kernels: on a GPU, one of their types, no gradients wanted."""
    return x.is_cuda and x.dtype in STORED and not torch.is_grad_enabled() and x.is_contiguous()


def fits_gpu_pages(block_size: int) -> bool:
    """Whether the attention kernel can read a cache of such blocks: what it reads at once lies in one."""
    return block_size % LEAST_KEYS == 0
