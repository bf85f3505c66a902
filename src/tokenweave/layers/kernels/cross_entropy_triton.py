"""The two passes of `layers.cross_entropy` over one rank's logits on CUDA, each reading them once."""
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl

# One program a row. 16 032 columns of bfloat16 are 32 KB: wide blocks of many loads in flight, no second pass.
BLOCK, WARPS = 4096, 8


@triton.jit
def statistics_kernel(
    logits,  # [tokens, columns]
    targets,  # int64 [tokens]
    found,  # float32 [tokens, 4]: largest, sum of exp(x - largest), the target's logit, sum of x / vocabulary
    stride,
    first,  # the id of column 0
    share,  # 1 / vocabulary
    columns: tl.constexpr,
    smoothed: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    mean = tl.zeros((), tl.float32)
    for left in range(0, columns, block):
        offsets = left + tl.arange(0, block)
        inside = offsets < columns
        x = tl.load(start + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        above = tl.maximum(top, tl.max(x, 0))
        base = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), 0)
        top = above
        if smoothed:
            mean += tl.sum(tl.where(inside, x * share, 0.0), 0)
    local = tl.load(targets + row) - first
    own = (local >= 0) & (local < columns)
    hit = tl.load(start + tl.where(own, local, 0), mask=own, other=0.0).to(tl.float32)
    tl.store(found + row * 4, top)
    tl.store(found + row * 4 + 1, total)
    tl.store(found + row * 4 + 2, hit)
    tl.store(found + row * 4 + 3, mean)


@triton.jit
def gradient_kernel(
    logits,  # [tokens, columns], overwritten
    targets,
    denominators,  # float32 [tokens, 2]: the largest logit, log of the sum of exp(x - largest)
    scales,  # float32 [tokens]: what the softmax is multiplied by
    grads,  # float32 [tokens]: of the loss
    stride,
    first,
    spread,  # smoothing / vocabulary
    hit,  # 1 - smoothing
    columns: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    local = tl.load(targets + row) - first
    top, log_sum = tl.load(denominators + row * 2), tl.load(denominators + row * 2 + 1)
    scale, grad = tl.load(scales + row), tl.load(grads + row)
    for left in range(0, columns, block):
        offsets = left + tl.arange(0, block)
        inside = offsets < columns
        x = tl.load(start + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        gradient = tl.exp((x - top) - log_sum) * scale - spread * grad - tl.where(offsets == local, hit * grad, 0.0)
        tl.store(start + offsets, gradient.to(logits.dtype.element_ty), mask=inside)


def write_statistics(
    logits: torch.Tensor, targets: torch.Tensor, found: torch.Tensor, first: int, vocabulary: int, smoothed: bool
) -> None:
    """found, float32 [tokens, 4], from logits [tokens, columns], whose columns are the ids from `first` on."""
    tokens, columns = _checked(logits, targets)
    assert found.shape == (tokens, 4) and found.dtype == torch.float32 and found.is_contiguous()
    if tokens:
        statistics_kernel[(tokens,)](
            logits, targets, found, logits.stride(0), first, 1 / vocabulary,
            columns=columns, smoothed=smoothed, block=_block(columns), num_warps=WARPS,
        )  # fmt: skip


def write_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    denominators: torch.Tensor,
    scales: torch.Tensor,
    grads: torch.Tensor,
    first: int,
    spread: float,
    hit: float,
) -> None:
    """Over the logits: exp(x - top - log_sum) * scale - spread * grad, less hit * grad at the target."""
    tokens, columns = _checked(logits, targets)
    assert denominators.shape == (tokens, 2) and scales.shape == grads.shape == (tokens,)
    assert all(t.dtype == torch.float32 for t in (denominators, scales, grads))
    if tokens:
        gradient_kernel[(tokens,)](
            logits, targets, denominators.contiguous(), scales.contiguous(), grads.contiguous(), logits.stride(0),
            first, spread, hit, columns=columns, block=_block(columns), num_warps=WARPS,
        )  # fmt: skip


def _checked(logits: torch.Tensor, targets: torch.Tensor) -> tuple[int, int]:
    assert logits.dim() == 2 and logits.stride(1) == 1 and targets.is_contiguous()
    return logits.shape[0], logits.shape[1]


def _block(columns: int) -> int:
    return min(BLOCK, triton.next_power_of_2(columns))
