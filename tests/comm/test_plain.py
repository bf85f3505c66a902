"""The Triton row kernel under Triton's interpreter, with the buffers of several ranks in one process.

The interpreter cuts float32 off where a GPU rounds it to bfloat16: that is checked on sums that need no rounding.
"""

import os
import subprocess
import sys

CASES = [
    (size, tokens, hidden, dtype, wide)
    for size, tokens, hidden in ((1, 3, 64), (2, 0, 64), (2, 1, 33), (3, 5, 130), (4, 2, 96))
    for dtype, wide in (("float32", False), ("float16", True), ("float16", False), ("bfloat16", True))
]


def test_rows_are_right() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1:] == [f"{len(CASES)} cases"], done.stdout


def faults(size: int, tokens: int, hidden: int, dtype_name: str, wide: bool) -> list[str]:
    import comm_oracle as oracle
    import torch

    from tokenweave.comm.kernels.plain import move_rows

    dtype = getattr(torch, dtype_name)
    whole = dtype == torch.bfloat16  # small whole numbers: their sums are exact
    torch.manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randint(-9, 10, shape).float() if whole else torch.randn(shape)).to(dtype)

    partials, residual = [draw(tokens, hidden) for _ in range(size)], draw(tokens, hidden)
    weight = torch.randn(hidden).to(torch.float32 if wide else dtype)

    def run(operation: int, rows: torch.Tensor) -> list[torch.Tensor]:
        buffers = [partial.clone() for partial in partials]
        table = torch.tensor([buffer.data_ptr() for buffer in buffers])
        for rank in range(size):
            own = oracle.rows(tokens, size, rank)
            move_rows[(2,)](
                table, table, rows[own], weight, own.start, own.stop - own.start, 1e-5, RANKS=size,
                OPERATION=operation, HIDDEN=hidden, WHOLE=hidden * dtype.itemsize % 16 == 0, BLOCK=64,
            )  # fmt: skip
        return buffers

    wrong = []
    y, x = oracle.fused(partials, residual, weight, 1e-5)
    rows = residual.clone()
    for rank, found in enumerate(run(1, rows)):
        if not whole and not torch.allclose(found.double(), x.double(), rtol=oracle.tolerance(dtype), atol=1e-3):
            wrong.append(f"normed rows of rank {rank}")
    if not torch.equal(rows, y):
        wrong.append("residual")
    total = oracle.total(partials).to(dtype)
    if not all(torch.equal(found, total) for found in run(2, rows)):
        wrong.append("all_reduce")
    scattered = torch.full_like(residual, float("nan"))
    if not all(torch.equal(a, b) for a, b in zip(run(3, scattered), partials, strict=True)):
        wrong.append("reduce_scatter wrote into a buffer")
    if not torch.equal(scattered, total):
        wrong.append("reduce_scatter")
    if not all(torch.equal(found, residual) for found in run(4, residual)):
        wrong.append("all_gather")
    return wrong


if __name__ == "__main__":
    found = {case: wrong for case in CASES if (wrong := faults(*case))}
    print(*found.items(), sep="\n")
    print(f"{len(CASES) - len(found)} cases")
