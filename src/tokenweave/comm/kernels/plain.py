"""The collectives' operations on rows in Triton, without waits: for GPUs before Hopper, and rows that are not whole
multiples of 16 bytes. The ranks meet in kernels of their own before and after (meet.cu)."""

import triton
import triton.language as tl

FUSED = tl.constexpr(1)  # as in operations.py
REDUCE_SCATTER = tl.constexpr(3)
ALL_GATHER = tl.constexpr(4)
BLOCK = 4096  # elements of a row that are summed at once


@triton.jit(do_not_specialize=["first", "own", "eps"], do_not_specialize_on_alignment=["rows", "weight"])
def move_rows(
    sources, targets, rows, weight, first, own, eps,
    RANKS: tl.constexpr, OPERATION: tl.constexpr, HIDDEN: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each row i of the `own` ones of this rank, which lie from row `first` on in every rank's buffer:

        total = buffers[0][first + i].float() + buffers[1][first + i].float() + ...
        FUSED           y = rows[i] = (total + rows[i]).to(dtype);  every buffer[first + i] = norm(y, weight, eps)
        ALL_REDUCE      every buffer[first + i] = total.to(dtype)
        REDUCE_SCATTER  rows[i] = total.to(dtype)
        ALL_GATHER      every buffer[first + i] = rows[i]

    sources, targets: int64 [RANKS], the buffers' addresses. WHOLE: rows are whole multiples of 16 bytes, and so moved
    16 bytes a thread.
    """
    dtype = rows.dtype.element_ty
    row = tl.program_id(0)
    while row < own:
        there = tl.cast(first + row, tl.int64) * HIDDEN
        here = tl.cast(row, tl.int64) * HIDDEN
        squares = 0.0
        for start in range(0, HIDDEN, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < HIDDEN
            if OPERATION == ALL_GATHER:
                result = tl.load(rows + here + column, inside, 0.0)
            else:
                total = tl.load(_buffer(sources, 0, dtype, WHOLE) + there + column, inside, 0.0).to(tl.float32)
                for rank in range(1, RANKS):
                    part = tl.load(_buffer(sources, rank, dtype, WHOLE) + there + column, inside, 0.0)
                    total += part.to(tl.float32)
                if OPERATION == FUSED:
                    total += tl.load(rows + here + column, inside, 0.0).to(tl.float32)
                result = total.to(dtype)
            if OPERATION == FUSED or OPERATION == REDUCE_SCATTER:
                tl.store(rows + here + column, result, inside)
            else:
                for rank in range(0, RANKS):
                    tl.store(_buffer(targets, rank, dtype, WHOLE) + there + column, result, inside)
            if OPERATION == FUSED:
                squares += tl.sum(result.to(tl.float32) * result.to(tl.float32), 0)
        if OPERATION == FUSED:
            tl.debug_barrier()  # the row is read back
            scale = 1.0 / tl.sqrt_rn(squares / HIDDEN + eps)
            for start in range(0, HIDDEN, BLOCK):
                column = start + tl.arange(0, BLOCK)
                inside = column < HIDDEN
                y = tl.load(rows + here + column, inside, 0.0).to(tl.float32)
                factor = tl.load(weight + column, inside, 0.0).to(tl.float32)
                x = ((y * scale).to(dtype).to(tl.float32) * factor).to(dtype)
                for rank in range(0, RANKS):
                    tl.store(_buffer(targets, rank, dtype, WHOLE) + there + column, x, inside)
        row += tl.num_programs(0)


@triton.jit
def _buffer(table, rank, dtype: tl.constexpr, WHOLE: tl.constexpr):
    address = tl.load(table + rank).to(tl.pointer_type(dtype))
    return tl.multiple_of(address, 16) if WHOLE else address
