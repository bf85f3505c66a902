import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from kernel_cases import DTYPES, ROUNDING, edges_untouched, guarded, rows

from tokenweave.layers.kernels.linear import DEPTH, FEW, project_rows
from tokenweave.layers.kernels.views import as_array, empty

# one of each remainder: of 4 weight rows, of 64 outputs, of 4 tokens, of 32 inputs, of DEPTH inputs
SHAPES = [(1, 1, 1), (1, 3, 31), (2, 5, 13), (3, 64, 33), (4, 67, 64), (5, 130, 577), (13, 4, 32), (33, 65, 96)]
MANY = [(17, 12, 34), (32, 16, 2), (49, 97, 64), (64, 100, 30), (77, 577, 66), (130, 200, 96)]  # tokens side by side
DEEP = [(1, 3, DEPTH), (5, 6, DEPTH + 1), (2, 66, 2 * DEPTH + 45), (70, 5, DEPTH + 32)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, outputs, inputs", SHAPES + MANY + DEEP)
def test_equals_the_product(tokens: int, outputs: int, inputs: int, dtype: torch.dtype, bias: bool) -> None:
    x, x_array = rows(dtype, tokens, inputs)
    weight, weight_array = rows(dtype, outputs, inputs)
    added, added_array = rows(dtype, outputs)
    out, whole = guarded(dtype, tokens, outputs)
    project_rows(x_array.ctypes.data, out.data_ptr(), tokens, weight_array, added_array if bias else empty(dtype))
    oracle = x.double() @ weight.double().T + (added.double() if bias else 0.0)
    sizes = x.double().abs() @ weight.double().abs().T + 1.0
    assert ((out.double() - oracle).abs() <= ROUNDING[dtype] * oracle.abs() + 3e-7 * sizes).all()
    assert edges_untouched(whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    tokens, outputs, inputs = 37, 70, DEPTH + 77
    x, x_array = rows(dtype, tokens, inputs)
    _, weight = rows(dtype, outputs, inputs)
    together = np.empty((tokens, outputs), x_array.dtype)
    project_rows(x_array.ctypes.data, together.ctypes.data, tokens, weight, empty(dtype))
    for first, count in ((0, 1), (1, 2), (30, 7), (3, 16)):
        part = np.empty((count, outputs), x_array.dtype)
        project_rows(x_array[first:].ctypes.data, part.ctypes.data, count, weight, empty(dtype))
        assert (part == together[first : first + count]).all()


def test_among_many_a_bfloat16_row_does_not_depend_on_how_many() -> None:
    x, _ = rows(torch.bfloat16, 77, 2 * DEPTH + 34)
    weight, weight_array = rows(torch.bfloat16, 35, 2 * DEPTH + 34)
    found = []
    for first, count in ((0, 77), (0, FEW + 1), (33, 33), (40, 37)):
        out = torch.empty(count, 35, dtype=torch.bfloat16)
        project_rows(x[first:].data_ptr(), out.data_ptr(), count, weight_array, empty(torch.bfloat16))
        found.append((first, out))
    assert all(torch.equal(out, found[0][1][first : first + len(out)]) for first, out in found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", [0, 31, 40])  # 32 of the 41 inputs go by vectors
def test_nan_and_infinity_pass_through(dtype: torch.dtype, position: int) -> None:
    for value, tokens, inputs in itertools.product((float("nan"), float("inf")), (6, 20), (41, 42)):
        x, _ = rows(dtype, tokens, inputs)
        weight = torch.ones(5, inputs, dtype=dtype)
        x[2, position], weight[3, position] = value, value
        out = torch.empty(tokens, 5, dtype=dtype)
        project_rows(x.data_ptr(), out.data_ptr(), tokens, as_array(weight), empty(dtype))
        oracle = x.double() @ weight.double().T
        assert torch.equal(out.isnan(), oracle.isnan()) and torch.equal(out.isinf(), oracle.isinf())


def test_no_tokens() -> None:
    x, out = torch.ones(1, 3), torch.full((1, 2), 7.0)
    project_rows(x.data_ptr(), out.data_ptr(), 0, as_array(torch.ones(2, 3)), empty(torch.float32))
    assert out.eq(7).all()


def test_processors_without_wide_vectors_give_the_same(tmp_path: os.PathLike) -> None:
    """A plain x86-64 has neither the bfloat16 product nor fused multiply-adds: other instructions, the same sums."""
    program = """
import torch
from tokenweave.layers.kernels.linear import project_rows
from tokenweave.layers.kernels.views import as_array, empty
for dtype, tolerance in ((torch.bfloat16, 4e-3), (torch.float32, 1e-6)):
    x, weight, out = torch.randn(5, 77).to(dtype), torch.randn(9, 77).to(dtype), torch.empty(5, 9, dtype=dtype)
    project_rows(x.data_ptr(), out.data_ptr(), 5, as_array(weight), empty(dtype))
    oracle = x.double() @ weight.double().T
    assert ((out.double() - oracle).abs() <= tolerance * (oracle.abs() + 1)).all()
    assert "zmm" not in project_rows.inspect_asm(project_rows.signatures[-1])
print("same")
"""
    environment = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout == "same\n", done.stderr
