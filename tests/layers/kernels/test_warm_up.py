import subprocess
import sys
from pathlib import Path

import pytest
import torch
from layer_cases import EVERYTHING, paged

from tokenweave.comm.kernels.kept import sources
from tokenweave.config import shard
from tokenweave.layers.kernels import attention, linear, lookup, mlp
from tokenweave.layers.kernels.warm_up import warm_up
from tokenweave.models.decoder import Decoder

KERNELS = [attention.attention_rows, attention.attend_rows, mlp.mlp_rows, mlp.gate_rows, linear.project_rows,
           lookup.look_up_rows]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_need_nothing_more_compiled(dtype: torch.dtype) -> None:
    warm_up(dtype)
    ready = [len(kernel.signatures) for kernel in KERNELS]
    model = Decoder(EVERYTHING, shard(EVERYTHING, 1, 0), dtype=dtype)
    for parameter in model.parameters():
        parameter.data.normal_()
    with torch.inference_mode():
        for requests in ([(1, 3)], [(60, 60), (1, 1)]):
            batch = paged(EVERYTHING, requests, block_size=4, dtype=dtype).batch
            x = torch.randn(batch.num_tokens, EVERYTHING.hidden_size).to(dtype)
            for stage in model.stages:
                stage.compute(x, batch, x)
            model.head(x)
    assert [len(kernel.signatures) for kernel in KERNELS] == ready


def test_the_next_process_compiles_nothing() -> None:
    warm_up(torch.bfloat16)
    program = """
import torch
from tokenweave.layers.kernels.warm_up import warm_up
from tokenweave.layers.kernels import attention, linear, lookup, mlp
warm_up(torch.bfloat16)
kernels = [attention.attention_rows, attention.attend_rows, mlp.mlp_rows, mlp.gate_rows, linear.project_rows,
           lookup.look_up_rows]
print([sum(kernel.stats.cache_misses.values()) for kernel in kernels])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout == f"{[0] * len(KERNELS)}\n", done.stderr


def test_an_edit_to_any_file_makes_kernels_compile_anew() -> None:
    """Numba alone would go on using a kernel compiled with another file's old functions."""
    stamp = sources(Path(attention.__file__).parent)
    assert all(kernel._cache._cache_file._source_stamp == stamp for kernel in KERNELS)
