"""The layers' GPU kernels: interpreted, and compiled with no GPU present."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="the GPU kernels need Triton")

from tokenweave.layers.kernels import gpu, gpu_attention  # noqa: E402


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


POINTERS = {"positions": "*i64", "slots": "*i64", "token_ids": "*i64", "cos": "*fp32"}
POINTERS |= {"sin": "*fp32"} | dict.fromkeys(("offsets", "contexts", "block_tables"), "*i32")
POINTERS |= {"part_sums": "*fp32", "part_peaks": "*fp32"}
ALIGNED = ("columns", "hidden", "query_stride", "part_sums", "part_peaks")
NUMBERS = dict.fromkeys(
    ("columns", "hidden", "first", "count", "table_stride", "tokens", "query_stride", "requests", "share"), "i32"
) | {"eps": "fp32", "scale": "fp32"}
HEADS = dict(GROUP=8, KV_HEADS=1, SIZE=128, SIZE_BLOCK=128, BLOCK_SIZE=256, WINDOW=0, STAGES=2)
CONSTANTS = {
    "silu_multiply": [dict(BLOCK=1024)],
    "add_rms_norm": [dict(BLOCK=8192)],
    "look_up": [dict(BLOCK=2048)],
    "rotate_and_cache": [
        dict(QUERY_HEADS=8, KV_HEADS=1, HALF=64, HEADS_BLOCK=8, KV_BLOCK=1, HALF_BLOCK=64, NORM=norm)
        for norm in (False, True)
    ],
    "attend": [
        HEADS | dict(ROWS=128, KEYS=128, SHARED=False), HEADS | dict(ROWS=64, KEYS=64, SHARED=True, STAGES=3),
        HEADS | dict(ROWS=16, KEYS=128, SHARED=True),
    ],
    "join_attended": [dict(HEADS=8, HEADS_BLOCK=8, SIZE=128, SIZE_BLOCK=128, WINDOW=0)],
}  # fmt: skip


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("kernel", list(CONSTANTS))
def test_compiles_without_spills(kernel: str, architecture: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(gpu_attention if "attend" in kernel else gpu, kernel)
    for constants in CONSTANTS[kernel]:
        signature = {
            name: "constexpr" if name in constants else NUMBERS.get(name) or POINTERS.get(name, "*bf16")
            for name in function.arg_names
        }
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, (name, kind) in enumerate(signature.items())
            if kind.startswith("*") and name not in POINTERS or name in ALIGNED
        }
        places = {(function.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(function, signature, places, aligned)
        warps = 16 if kernel == "add_rms_norm" else 8 if constants.get("ROWS") == 128 else 4
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})
        assert len(made.asm["cubin"]) > 1000
        if kernel in ("silu_multiply", "add_rms_norm"):
            assert "v4.b32" in made.asm["ptx"], "accesses of 16 bytes"
        if kernel == "attend" and architecture == 90 and constants["ROWS"] >= 64:
            assert "wgmma.mma_async" in made.asm["ptx"], "Hopper's own instructions"
        assert ".local" not in made.asm["ptx"], "registers are spilled"
