"""The layers' GPU kernels: interpreted, and compiled with no GPU present."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="the GPU kernels need Triton")

from tokenweave.layers.kernels import gpu  # noqa: E402


def test_kernels_interpreted() -> None:
    """In a process of its own: Triton decides at import whether its own functions are interpreted."""
    run_kernel_tests(os.environ | {"TRITON_INTERPRET": "1"})


@pytest.mark.gpu
def test_kernels_on_the_gpu() -> None:
    run_kernel_tests({name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"})


def run_kernel_tests(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "cuda_kernels.py"]
    environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
    found = subprocess.run(command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-4000:]


POINTERS = {"positions": "*i64", "slots": "*i64", "packed_rows": "*i64", "token_ids": "*i64", "cos": "*fp32"}
POINTERS |= {"sin": "*fp32"} | dict.fromkeys(("offsets", "contexts", "packed_starts", "block_tables"), "*i32")
NUMBERS = dict.fromkeys(
    ("columns", "hidden", "first", "count", "table_stride", "tokens", "chunks", "block_size"), "i32"
) | {"eps": "fp32"}
CONSTANTS = {
    "silu_multiply": [dict(BLOCK=1024)],
    "add_rms_norm": [dict(BLOCK=8192)],
    "look_up": [dict(BLOCK=2048)],
    "rotate_and_cache": [
        dict(QUERY_HEADS=8, KV_HEADS=1, HALF=64, HEADS_BLOCK=8, KV_BLOCK=1, HALF_BLOCK=64, NORM=norm, PACK=pack,
             PAST_ROWS=64, KV_SIZE_BLOCK=128)
        for norm in (False, True) for pack in (False, True)
    ],
}  # fmt: skip


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("kernel", list(CONSTANTS))
def test_compiles_without_spills(kernel: str, architecture: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(gpu, kernel)
    for constants in CONSTANTS[kernel]:
        signature = {
            name: "constexpr" if name in constants else NUMBERS.get(name) or POINTERS.get(name, "*bf16")
            for name in function.arg_names
        }
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, (name, kind) in enumerate(signature.items())
            if kind.startswith("*") and name not in POINTERS or name in ("columns", "hidden")
        }
        places = {(function.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(function, signature, places, aligned)
        warps = 16 if kernel == "add_rms_norm" else 4
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})
        assert len(made.asm["cubin"]) > 1000
        if kernel in ("silu_multiply", "add_rms_norm"):
            assert "v4.b32" in made.asm["ptx"], "accesses of 16 bytes"
        assert ".local" not in made.asm["ptx"], "registers are spilled"
