"""What a rank is doing, as three integers that ranks compare and as words in an error.

(code, rows, columns); code = Operation | dtype_code << 8 | detail << 16. The detail is the root of a broadcast or the
number of lanes of a collective.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch

from tokenweave.comm.control import DEAD, LATE
from tokenweave.comm.shape import DTYPES


class Operation(IntEnum):
    """The first four are those of kernels.exchange."""

    ALL_REDUCE_ADD_RMS_NORM = 1
    ALL_REDUCE = 2
    REDUCE_SCATTER = 3
    ALL_GATHER = 4
    GATHER = 5
    BROADCAST = 6
    BARRIER = 7
    OPEN_COLLECTIVE = 8


def dtype_code(dtype: torch.dtype) -> int:
    """gather and broadcast take any dtype; beyond those of a collective only the size of an element matters."""
    return DTYPES.index(dtype) if dtype in DTYPES else 16 + dtype.itemsize


def describe(words: Sequence[int]) -> str:
    """The operation that (code, rows, columns) stand for, for people."""
    packed, rows, columns = words
    try:
        operation = Operation(packed & 0xFF)
    except ValueError:
        return "nothing yet"
    name, detail = operation.name.lower(), packed >> 16
    kind = packed >> 8 & 0xFF
    element = str(DTYPES[kind]).removeprefix("torch.") if kind < len(DTYPES) else f"{kind - 16}-byte elements"
    if operation == Operation.BARRIER:
        return name
    if operation == Operation.BROADCAST:
        return f"broadcast of {rows} bytes from rank {detail}"
    lanes = f", {detail} lanes" if operation == Operation.OPEN_COLLECTIVE else ""
    return f"{name} of [{rows}, {columns}] {element}{lanes}"


def explain(finding: Sequence[int], timeout: float) -> str:
    """The message that every rank raises: who, in which operation, on which lane. finding: `Control.finding`."""
    reporter, reason, peer, lane = finding[:4]
    here, there = f"{describe(finding[4:7])} on lane {lane}", describe(finding[7:10])
    if reason == LATE:
        return f"rank {peer} did not come to {here} within {timeout:g} s; rank {reporter} waited for it"
    if reason == DEAD:
        return f"rank {peer} has died; rank {reporter} waited for it in {here}"
    return f"rank {peer} came with {there} where rank {reporter} came with {here}"
