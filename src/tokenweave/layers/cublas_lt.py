"""Matrix products by an algorithm that cuBLASLt chooses for fewer processors than the GPU has.

Beside a kernel that holds 8 of an H200's 132 SMs, cuBLAS's own choice for the whole GPU loses up to a wave of tiles:
the down projection of Llama-70B at tp 8 takes 70 to 76 µs instead of 42 at 512 tokens, and by the algorithm chosen for
124 SMs 46 to 49. torch has no way to say so, hence these few calls of the C library that torch has loaded.
"""

import ctypes
from functools import cache

import torch

WORKSPACE_BYTES = 32 << 20
CANDIDATES, TIMED = 8, 3  # algorithms that cuBLASLt proposes, it never has more, and runs of each
FLUSH_BYTES = 256 << 20  # more than any cache holds
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
_COMPUTE_FLOAT32, _FLOAT32, _TRANSPOSED = 68, 0, 1
# attributes of a matmul descriptor and of a preference, in cublasLt.h
_TRANSA, _EPILOGUE, _BIAS_POINTER, _BIAS_TYPE, _SM_COUNT_TARGET = 3, 7, 8, 26, 15
_EPILOGUE_BIAS = 4
_MAX_WORKSPACE_BYTES = 1


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, processors: int
) -> torch.Tensor:
    """out = x @ weight.T + bias by an algorithm for so many processors. x: [m, k]; weight: [n, k]; out: [m, n], not the
    memory of x; all contiguous and of one type. The first call for a shape asks cuBLASLt for algorithms and takes the
    fastest of them, alone and with cold caches; it raises inside a capture.

    cuBLASLt's first is not always the best: for 124 of an H200's processors the down projection of Llama-70B at tp 8
    takes 83 µs with 704 rows, and the fastest 67.
    """
    m, k = x.shape
    n = weight.shape[0]
    if not (x.is_contiguous() and weight.is_contiguous() and out.is_contiguous() and out.shape == (m, n)):
        raise ValueError(f"x, weight and out must be contiguous, and out [{m}, {n}], got {list(out.shape)}")
    if not m:
        return out
    product = _product(m, n, k, x.dtype, bias is not None, processors, x.device.index)
    product.run(x, weight, bias, out)
    return out


class _Product:
    """One shape's descriptors and algorithm."""

    def __init__(self, m: int, n: int, k: int, dtype: torch.dtype, biased: bool, processors: int, device: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"the product [{m}, {k}] x [{k}, {n}] was not run before the capture")
        library = self._library = _library()
        self._handle, self._workspace = _handle(device), _workspace(device)
        self._description = ctypes.c_void_p()
        _check(library.cublasLtMatmulDescCreate(ctypes.byref(self._description), _COMPUTE_FLOAT32, _FLOAT32))
        self._set(_TRANSA, ctypes.c_int32(_TRANSPOSED))  # column-major: out' = (weight')' x'
        self._set(_SM_COUNT_TARGET, ctypes.c_int32(processors))
        if biased:
            self._set(_EPILOGUE, ctypes.c_uint32(_EPILOGUE_BIAS))
            self._set(_BIAS_TYPE, ctypes.c_int32(_TYPES[dtype]))
        self._layouts = [_layout(dtype, *shape) for shape in ((k, n), (k, m), (n, m))]
        weight, x, out = self._layouts
        preference = ctypes.c_void_p()
        _check(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        most = ctypes.c_size_t(WORKSPACE_BYTES)
        _check(
            library.cublasLtMatmulPreferenceSetAttribute(
                preference, _MAX_WORKSPACE_BYTES, ctypes.byref(most), ctypes.c_size_t(ctypes.sizeof(most))
            )
        )
        found, self._proposed = ctypes.c_int(), (_Heuristic * CANDIDATES)()
        status = library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._description, weight, x, out, out, preference, CANDIDATES,
            ctypes.byref(self._proposed), ctypes.byref(found),
        )  # fmt: skip
        library.cublasLtMatmulPreferenceDestroy(preference)
        _check(status)
        if not found.value:
            raise RuntimeError(f"cuBLASLt has no algorithm for [{m}, {k}] x [{k}, {n}] in {dtype}")
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._count, self._best = found.value, -1

    def run(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        if bias is not None:
            self._set(_BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
        if self._best < 0:
            self._best = self._fastest(x, weight, out)
        _check(self._launch(self._best, x, weight, out))

    def _fastest(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> int:
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=x.device)
        medians = []
        for which in range(self._count):
            times = []
            if self._launch(which, x, weight, out):  # proposed, but not for these pointers
                medians.append(float("inf"))
                continue
            for _ in range(TIMED):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()
                begin.record()
                _check(self._launch(which, x, weight, out))
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
            medians.append(sorted(times)[TIMED // 2])
        return min(range(self._count), key=lambda which: medians[which])

    def _launch(self, which: int, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> int:
        weight_layout, x_layout, out_layout = self._layouts
        target = ctypes.c_void_p(out.data_ptr())
        return self._library.cublasLtMatmul(
            self._handle, self._description, ctypes.byref(self._one),
            ctypes.c_void_p(weight.data_ptr()), weight_layout, ctypes.c_void_p(x.data_ptr()), x_layout,
            ctypes.byref(self._zero), target, out_layout, target, out_layout,
            ctypes.byref(self._proposed[which].algorithm),
            ctypes.c_void_p(self._workspace.data_ptr()), ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )  # fmt: skip

    def _set(self, attribute: int, value: ctypes._SimpleCData) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _check(
            self._library.cublasLtMatmulDescSetAttribute(self._description, attribute, ctypes.byref(value), size)
        )  # fmt: skip


@cache
def _product(
    m: int, n: int, k: int, dtype: torch.dtype, biased: bool, processors: int, device: int
) -> _Product:  # fmt: skip
    return _Product(m, n, k, dtype, biased, processors, device)


@cache
def _library() -> ctypes.CDLL:
    assert torch.version.cuda is not None
    return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")


@cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(ctypes.byref(handle)))
    return handle


@cache
def _workspace(device: int) -> torch.Tensor:
    """One for all products: they run one after another, on the stream that computes."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=torch.device("cuda", device))


def _layout(dtype: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
    """Column-major, without gaps."""
    layout = ctypes.c_void_p()
    _check(
        _library().cublasLtMatrixLayoutCreate(
            ctypes.byref(layout), _TYPES[dtype], ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        )
    )
    return layout


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status}")
