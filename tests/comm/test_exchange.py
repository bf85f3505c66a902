"""The kernels on one process's own memory: rounding, any alignment, any hidden size."""

import numpy as np
import pytest
import torch

from tokenweave.comm.kernels.exchange import ALL_GATHER, ALL_REDUCE, FUSED, REDUCE_SCATTER
from tokenweave.comm.kernels.sync import LANE_WORDS, LaneWord
from tokenweave.comm.local import compiled_combine

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def combine(operation, partials, target, rows, weight=None, eps=1e-5) -> None:
    """The kernel as rank 0 of a group of one, whose partials have come from as many ranks as there are."""
    hidden, dtype = target.shape[1], target.dtype
    words = np.zeros(LANE_WORDS, dtype=np.int64)
    words[LaneWord.SIZE] = len(partials)
    # Rows belong to the last rank: with `len(partials)` ranks and one row it owns that row.
    words[LaneWord.RANK] = len(partials) - 1
    words[LaneWord.HIDDEN], words[LaneWord.ROW_BYTES] = hidden, hidden * dtype.itemsize
    words[LaneWord.TARGETS] = target.data_ptr()
    for rank, partial in enumerate(partials):
        words[LaneWord.SOURCES + rank] = partial.data_ptr()
    run = compiled_combine(str(dtype).removeprefix("torch."))
    wide = weight is not None and weight.dtype == torch.float32
    run(words.ctypes.data, operation, rows.data_ptr(), 0 if weight is None else weight.data_ptr(), wide, 1, eps)


def every_value(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """All bit patterns of a 16-bit type in some order; for float32 as many random ones."""
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(seed))
    if dtype == torch.float32:
        high = torch.randint(0, 1 << 16, (1 << 16,), generator=torch.Generator().manual_seed(seed + 1))
        return ((order << 16 | high) - (1 << 31)).to(torch.int32).view(dtype)
    return (order - (1 << 15)).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_sums_round_to_nearest_even(dtype: torch.dtype, seed: int) -> None:
    """Subnormals, infinities and NaN too, which some processors' own conversions treat otherwise."""
    partials = [every_value(dtype, seed + 10 * rank).view(1, -1) for rank in range(2)]
    for scale in (1.0, 2**-10):
        partials[1] = (partials[1].float() * scale).to(dtype)
        target = torch.empty_like(partials[0])
        combine(ALL_REDUCE, partials, target, target)
        want = (partials[0].float() + partials[1].float()).to(dtype)
        nan = torch.isnan(want)
        assert torch.equal(torch.isnan(target), nan)
        assert torch.equal(target[~nan].view(torch.uint8), want[~nan].view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_hidden_size(dtype: torch.dtype) -> None:
    """Blocks, vectors and single elements at the end; nothing is written beyond."""
    for hidden in (*range(1, 131), 576, 577):
        draw = torch.randn(6, hidden, generator=torch.Generator().manual_seed(hidden)).to(dtype)
        partials, residual = list(draw[:3].split(1)), draw[3:4]
        weight = draw[4].float()
        y = (partials[0].float() + partials[1].float() + partials[2].float() + residual.float()).to(dtype)
        scaled = (y.double() * (y.double().square().mean() + 1e-5).rsqrt()).to(dtype)
        want = (weight.double() * scaled.double()).to(dtype)
        target, rows = torch.full((1, hidden + 64), 7.0, dtype=dtype), torch.full((1, hidden + 64), 7.0, dtype=dtype)
        rows[:, :hidden] = residual
        combine(FUSED, partials, target[:, :hidden], rows, weight)
        assert torch.equal(rows[:, :hidden], y)
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
        torch.testing.assert_close(target[:, :hidden], want, rtol=tolerance, atol=tolerance)
        assert (target[:, hidden:] == 7).all() and (rows[:, hidden:] == 7).all()
        for operation, place in ((REDUCE_SCATTER, rows), (ALL_GATHER, target)):
            combine(operation, partials, target[:, :hidden], rows)
            total = (partials[0].float() + partials[1].float() + partials[2].float()).to(dtype)
            assert torch.equal(place[:, :hidden], total)
            assert (place[:, hidden:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_alignment(dtype: torch.dtype) -> None:
    hidden = 577
    draw = torch.randn(4, hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = []
    for shift in (0, 1, 2, 3, 5, 8, 31):
        memory = torch.zeros(5, hidden + 64, dtype=dtype)
        moved = memory[:, shift : shift + hidden]
        moved[:4] = draw
        combine(FUSED, [moved[0:1], moved[1:2]], moved[4:5], moved[2:3], moved[3])
        found.append(moved[[2, 4]].clone())
    assert all(torch.equal(bits, found[0]) for bits in found)


def test_the_sum_goes_in_rank_order() -> None:
    big, small = torch.full((1, 80), 2.0**24), torch.ones(1, 80)
    target = torch.empty(1, 80)
    combine(ALL_REDUCE, [big, small, small], target, target)
    assert (target == 2.0**24).all()  # each 1 is lost by itself
    combine(ALL_REDUCE, [small, small, big], target, target)
    assert (target == 2.0**24 + 2).all()
