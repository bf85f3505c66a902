"""Compiled kernels in this process's CUDA context, and their launches."""

import ctypes
from functools import cache
from typing import Any

import torch

from tokenweave.comm.kernels.compiler import (
    BULK_FILES,
    MEETING_FILES,
    MULTICAST_FILES,
    Tiling,
    compile_cuda,
    multicast_warps,
)
from tokenweave.comm.kernels.lane_words import LaneWord
from tokenweave.comm.operations import Operation
from tokenweave.comm.shape import DTYPES
from tokenweave.config import partition

_ENTRY = {
    Operation.ALL_REDUCE: "all_reduce", Operation.REDUCE_SCATTER: "reduce_scatter", Operation.ALL_GATHER: "all_gather",
}  # fmt: skip
_BODY = ("fused", "fused_wide", *_ENTRY.values())
_MEETING = ("barrier", "come", "leave")
_ROWS = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_uint64)
_LANE = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_int32)


class Module:
    """One compiled file, loaded into the current context, every kernel of it at once: nothing is loaded at a launch."""

    def __init__(self, cubin: bytes, names: tuple[str, ...], shared_bytes: int = 0) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._module = _checked(driver.cuModuleLoadData(cubin))
        self._functions = {name: _checked(driver.cuModuleGetFunction(self._module, name.encode())) for name in names}
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        for name in names:
            if name in _BODY:
                _checked(driver.cuFuncSetAttribute(self._functions[name], limit, shared_bytes))

    def launch(
        self, name: str, values: Any, types: Any, *, stream: int, blocks: int = 1, threads: int = 128,
        shared_bytes: int = 0,
    ) -> None:  # fmt: skip
        function = self._functions[name]
        _checked(
            self._driver.cuLaunchKernel(
                function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, (values, types), 0
            )
        )  # fmt: skip


class RowsOfChunks:
    """The operations on rows of one size and type, by bulk copies or through the switch: a kernel each."""

    def __init__(self, module: Module, threads: int, shared_bytes: int) -> None:
        self._module, self._threads, self._shared_bytes = module, threads, shared_bytes

    def launch(
        self, operation: Operation, lane: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, *, tokens: int,
        own: int, eps: float, pace: float, blocks: int, stream: int,
    ) -> None:  # fmt: skip
        """lane: its words. own: how many of the tokens are this rank's. pace: seconds that it must take."""
        if rows.data_ptr() % 16 or weight.data_ptr() % 16:
            raise ValueError("residual, rows and weight must begin at multiples of 16 bytes")
        wide = weight.dtype == torch.float32
        name = _ENTRY.get(operation) or ("fused_wide" if wide else "fused")
        values = (lane.data_ptr(), rows.data_ptr(), weight.data_ptr(), tokens, eps, int(pace * 1e9))
        self._module.launch(
            name, values, _ROWS, stream=stream, blocks=max(1, min(blocks, own)), threads=self._threads,
            shared_bytes=self._shared_bytes,
        )  # fmt: skip

    def barrier(self, lane: torch.Tensor, stream: int) -> None:
        self._module.launch("barrier", (lane.data_ptr(),), _LANE[:1], stream=stream)


class PlainRows:
    """What the kernels do with rows, in Triton: on any GPU, for rows of any size and without waits; on torch's current
    stream, as Triton launches."""

    def __init__(self, hidden: int, whole: bool, size: int) -> None:
        from tokenweave.comm.kernels.plain import BLOCK, move_rows

        self._move, self._size = move_rows, size
        self._constants = {"HIDDEN": hidden, "WHOLE": whole, "BLOCK": min(BLOCK, 1 << (hidden - 1).bit_length())}

    def move(
        self, operation: Operation, sources: torch.Tensor, targets: torch.Tensor, rows: torch.Tensor,
        weight: torch.Tensor, *, first: int, own: int, eps: float, blocks: int,
    ) -> None:  # fmt: skip
        """See `kernels.plain`. sources, targets: int64 [size], which begin at multiples of 16 bytes."""
        self._move[(max(1, min(blocks, own)),)](
            sources, targets, rows, weight, first, own, eps, RANKS=self._size, OPERATION=int(operation), num_warps=8,
            **self._constants,
        )  # fmt: skip


class PlainKernels:
    """The operations by `PlainRows`: with two kernels more for each, in which ranks meet."""

    def __init__(self, module: Module, plain: PlainRows, rank: int, size: int) -> None:
        self._module, self._plain, self._rank, self._size = module, plain, rank, size

    def launch(
        self, operation: Operation, lane: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, *, tokens: int,
        own: int, eps: float, pace: float, blocks: int, stream: int,
    ) -> None:  # fmt: skip
        meeting = (lane.data_ptr(), int(operation), tokens)
        self._module.launch("come", meeting, _LANE, stream=stream)
        self._plain.move(
            operation, lane[LaneWord.SOURCES :], lane[LaneWord.TARGETS :], rows, weight,
            first=partition(tokens, self._size, self._rank).start, own=own, eps=eps, blocks=blocks,
        )  # fmt: skip
        self._module.launch("leave", meeting, _LANE, stream=stream)

    def barrier(self, lane: torch.Tensor, stream: int) -> None:
        self._module.launch("barrier", (lane.data_ptr(),), _LANE[:1], stream=stream)


@cache
def bulk_kernels(
    dtype: torch.dtype, hidden: int, tiling: Tiling, capability: tuple[int, int], device: int, *, emulated: bool
) -> RowsOfChunks:
    """Compiled and loaded once in a process, on the current device, which is number `device`."""
    defines = {"ELEMENT": DTYPES.index(dtype), "HIDDEN": hidden, "EMULATED": int(emulated), **tiling.defines}
    compiled = compile_cuda(BULK_FILES, defines, capability)
    module = Module(compiled.cubin, (*_BODY, "barrier"), tiling.shared_bytes)
    return RowsOfChunks(module, tiling.threads, tiling.shared_bytes)


@cache
def multicast_kernels(dtype: torch.dtype, hidden: int, capability: tuple[int, int], device: int) -> RowsOfChunks:
    """As `bulk_kernels`."""
    warps = multicast_warps(hidden * dtype.itemsize)
    defines = {"ELEMENT": DTYPES.index(dtype), "HIDDEN": hidden, "WARPS": warps}
    compiled = compile_cuda(MULTICAST_FILES, defines, capability)
    return RowsOfChunks(Module(compiled.cubin, (*_BODY, "barrier")), 32 * warps, 0)


def plain_kernels(
    dtype: torch.dtype, hidden: int, capability: tuple[int, int], device: torch.device, *, rank: int, size: int
) -> PlainKernels:
    """With every variant compiled and loaded."""
    defines = {"ELEMENT": DTYPES.index(dtype), "HIDDEN": hidden}
    module = Module(compile_cuda(MEETING_FILES, defines, capability).cubin, _MEETING)
    return PlainKernels(module, plain_rows(dtype, hidden, device, size=size), rank, size)


def plain_rows(dtype: torch.dtype, hidden: int, device: torch.device, *, size: int) -> PlainRows:
    """With every variant compiled and loaded: each has run once, on no rows."""
    plain = PlainRows(hidden, hidden * dtype.itemsize % 16 == 0, size)
    table = torch.zeros(size, dtype=torch.int64, device=device)
    rows = torch.zeros(16, dtype=dtype, device=device)
    fused = Operation.ALL_REDUCE_ADD_RMS_NORM
    for operation, weight in ((fused, rows.float()), (fused, rows), *((operation, rows) for operation in _ENTRY)):
        plain.move(operation, table, table, rows, weight, first=0, own=0, eps=0.0, blocks=1)
    return plain


def address_on_gpu(address: int) -> int:
    """Where the GPU finds registered memory of the host."""
    from cuda.bindings import driver

    return int(_checked(driver.cuMemHostGetDevicePointer(address, 0)))


def _checked(answer: tuple[Any, ...]) -> Any:
    if answer[0].value != 0:
        raise RuntimeError(f"CUDA: {answer[0].name}")
    return answer[1] if len(answer) > 1 else None
