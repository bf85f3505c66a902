"""The Triton kernels of cross entropy under Triton's interpreter, which runs them on the CPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import torch
from torch.nn import functional as F
from tokenweave.layers.kernels import cross_entropy_triton as kernels

kernels.BLOCK = 32  # several blocks, the last one not full
torch.manual_seed(0)
for tokens, columns, dtype, scale in (
    (1, 1, torch.float32, 1.0), (3, 33, torch.float32, 1.0),
    (5, 577, torch.bfloat16, 8.0), (4, 70, torch.float32, 1000.0),
):
    first, vocabulary = 10, columns + 30
    logits = (torch.randn(tokens, columns) * scale).to(dtype)
    logits[0, : columns // 2] = -torch.inf
    targets = torch.randint(first, first + columns, (tokens,))
    targets[-1] = first + columns  # of the next rank
    wide, local = logits.double(), targets - first
    own = (local >= 0) & (local < columns)
    hit = wide.gather(1, local.clamp(0, columns - 1).unsqueeze(1)).squeeze(1)
    hit = torch.where(own, hit, 0.0)
    found = torch.full((tokens, 4), torch.nan)
    kernels.write_statistics(logits, targets, found, first, vocabulary, True)
    top = wide.amax(1)
    expected = torch.stack((top, (wide - top.unsqueeze(1)).exp().sum(1), hit, wide.sum(1) / vocabulary), 1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    denominators = torch.stack((top, torch.rand(tokens).double()), 1).float()
    scales, grads = torch.rand(tokens), torch.rand(tokens)
    kernels.write_gradient(logits, targets, denominators, scales, grads, first, 0.25, 0.75)
    gradient = (wide - denominators.double().sum(1, keepdim=True)).exp() * scales.unsqueeze(1)
    gradient -= 0.25 * grads.unsqueeze(1)
    gradient[torch.arange(tokens)[own], local[own]] -= 0.75 * grads[own].double()
    rtol = 1e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(logits.double(), gradient, rtol=rtol, atol=1e-3 if scale == 1000 else 1e-6)
found = torch.empty(0, 4)
kernels.write_statistics(torch.empty(0, 7), torch.empty(0).long(), found, 0, 7, False)
print("equal")
"""


def test_equals_float64() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "equal\n", done.stderr[-2000:]
