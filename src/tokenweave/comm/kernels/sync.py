"""How ranks wait for each other: counters in shared memory, and the page that says why a group has ended.

Addresses are integers. A lane's block of private words (`LaneWord`) tells a kernel where everything is; each rank has
a line of its own in shared memory (`LINE_WORDS`) that only it writes.
"""

import platform
from enum import IntEnum
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from tokenweave.comm.control import ABORT, DEAD, DEATH, FINDING_BYTES, FINDINGS, LATE, MAX_RANKS, MISMATCH

LINE_BYTES = 128  # two cache lines: processors fetch them in pairs
SPINS = 100  # pauses before the first yield, about 2 us


class LaneWord(IntEnum):
    """Private words of one rank's lane."""

    SIZE = 0
    RANK = 1
    LINES = 2  # address of the lane's first line; the ranks' lines follow each other
    CONTROL = 3  # address of the control page
    TIMEOUT = 4  # ns
    SEQUENCE = 5  # barriers passed
    HIDDEN = 6
    LANE = 7
    CODE = 8  # what this rank is doing: operation and its shape, compared with the peers'
    ROWS = 9
    COLUMNS = 10
    ROW_BYTES = 11
    SOURCES = 16  # address of each rank's rows to read
    TARGETS = 16 + MAX_RANKS  # address of each rank's buffer


LANE_WORDS = LaneWord.TARGETS + MAX_RANKS

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", []), "aarch64": ("llvm.aarch64.hint", [_I32(1)])}


def _pointer(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, _I64.as_pointer())


@intrinsic
def word(context, address):  # type: ignore[no-untyped-def]
    """The 64-bit integer at `address`."""
    return types.int64(types.int64), lambda context, builder, signature, args: builder.load(_pointer(builder, args[0]))


@intrinsic
def set_word(context, address, value):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        builder.store(args[1], _pointer(builder, args[0]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def acquire(context, address):  # type: ignore[no-untyped-def]
    """The word at `address`; what its writer wrote before `release` is seen by whatever follows."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.load_atomic(_pointer(builder, args[0]), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def release(context, address, value):  # type: ignore[no-untyped-def]
    """Store the word after all that was written before."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def fence(context):  # type: ignore[no-untyped-def]
    """Everything written before, past the cache too, is seen before anything written after."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def replace_zero(context, address, value):  # type: ignore[no-untyped-def]
    """Store the word only if it is 0; of several ranks that try, one succeeds."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        builder.cmpxchg(_pointer(builder, args[0]), ir.Constant(_I64, 0), args[1], "acq_rel", "acquire")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def pause(context):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        if (machine := platform.machine()) in _PAUSES:
            name, arguments = _PAUSES[machine]
            kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)
        return context.get_dummy_value()

    return types.void(), generate


def _libc(builder: ir.IRBuilder, name: str, arguments: list[ir.Type]) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, arguments), name)


@intrinsic
def yield_core(context):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        builder.call(_libc(builder, "sched_yield", []), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def monotonic_ns(context):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        time = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        first, second = (builder.gep(time, [_I32(0), _I32(i)]) for i in (0, 1))
        builder.call(_libc(builder, "clock_gettime", [_I32, time.type]), [_I32(1), time])  # CLOCK_MONOTONIC
        return builder.add(builder.mul(builder.load(first), _I64(1_000_000_000)), builder.load(second))

    return types.int64(), generate


@njit
def lane_word(lane, which):  # type: ignore[no-untyped-def]
    return word(lane + which * 8)


@njit
def declare(lane, code, rows, columns):  # type: ignore[no-untyped-def]
    """What this rank brings to the next barriers."""
    set_word(lane + LaneWord.CODE * 8, code)
    set_word(lane + LaneWord.ROWS * 8, rows)
    set_word(lane + LaneWord.COLUMNS * 8, columns)


@njit
def abort(lane, reason, peer):  # type: ignore[no-untyped-def]
    """Say what this rank found wrong with `peer` and end the group, unless another rank has done so before."""
    control = lane_word(lane, LaneWord.CONTROL)
    finding = control + FINDINGS + lane_word(lane, LaneWord.RANK) * FINDING_BYTES
    set_word(finding, reason)
    set_word(finding + 8, peer)
    set_word(finding + 16, lane_word(lane, LaneWord.LANE))
    slot = lane_word(lane, LaneWord.LINES) + peer * LINE_BYTES + 8 + (lane_word(lane, LaneWord.SEQUENCE) & 1) * 24
    for i in range(3):
        set_word(finding + 24 + 8 * i, lane_word(lane, LaneWord.CODE + i))
        set_word(finding + 48 + 8 * i, word(slot + 8 * i))
    replace_zero(control + ABORT, lane_word(lane, LaneWord.RANK) + 1)


@njit
def wait_for(lane, peer, sequence):  # type: ignore[no-untyped-def]
    """Wait until `peer` has arrived at barrier `sequence`; False if that cannot be, or not in time."""
    line = lane_word(lane, LaneWord.LINES) + peer * LINE_BYTES
    for _ in range(SPINS):
        if acquire(line) >= sequence:
            return True
        pause()
    control = lane_word(lane, LaneWord.CONTROL)
    deadline = monotonic_ns() + lane_word(lane, LaneWord.TIMEOUT)
    while True:
        # In this order: a rank that has returned had passed this barrier, so that `peer` is seen to have arrived.
        ended = acquire(control + ABORT) != 0 or acquire(control + DEATH) != 0
        late = monotonic_ns() > deadline
        if acquire(line) >= sequence:
            return True
        if acquire(control + DEATH) != 0:
            abort(lane, DEAD, acquire(control + DEATH) - 1)
        elif late:
            abort(lane, LATE, peer)
        if ended or late:
            return False
        yield_core()


@njit
def barrier(lane):  # type: ignore[no-untyped-def]
    """Wait until every rank is here with the same operation and shape. What a rank wrote before is seen by all after.

    False if the group has ended; the control page then says why. A rank's line holds the barrier it has reached and,
    in two slots used in turn, what it is doing: a rank can be one barrier ahead, never two.
    """
    sequence = lane_word(lane, LaneWord.SEQUENCE) + 1
    set_word(lane + LaneWord.SEQUENCE * 8, sequence)
    slot = 8 + (sequence & 1) * 24
    lines = lane_word(lane, LaneWord.LINES)
    own = lines + lane_word(lane, LaneWord.RANK) * LINE_BYTES
    code, rows, columns = (
        lane_word(lane, LaneWord.CODE), lane_word(lane, LaneWord.ROWS), lane_word(lane, LaneWord.COLUMNS),
    )  # fmt: skip
    set_word(own + slot, code)
    set_word(own + slot + 8, rows)
    set_word(own + slot + 16, columns)
    release(own, sequence)
    for peer in range(lane_word(lane, LaneWord.SIZE)):
        line = lines + peer * LINE_BYTES
        if acquire(line) < sequence and not wait_for(lane, peer, sequence):
            return False
        if word(line + slot) != code or word(line + slot + 8) != rows or word(line + slot + 16) != columns:
            abort(lane, MISMATCH, peer)
            return False
    return acquire(lane_word(lane, LaneWord.CONTROL) + ABORT) == 0
