"""A rank's memory while it loads and runs: its own share of the weights and little else."""

import json
import math
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from engine.test_engine_failures import ranks_of
from tiny import FAMILIES, save

from tokenweave.config import shard
from tokenweave.config.foreign import read_config
from tokenweave.engine.llm import LLM
from tokenweave.engine.params import SamplingParams
from tokenweave.models.decoder import Decoder

pytestmark = pytest.mark.started

CONFIG = dict(
    architectures=["LlamaForCausalLM"], vocab_size=32_001, hidden_size=2048, intermediate_size=8192,
    num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=2048,
    rms_norm_eps=1e-5, tie_word_embeddings=True, torch_dtype="bfloat16",
)  # fmt: skip


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """1.6 GB of zeros that take no place on the disk."""
    import torch

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = read_config(tmp_path)
    model = Decoder(config, shard(config, 1, 0), dtype=torch.bfloat16, device="meta")
    header, end = {}, 0
    for piece in model.pieces():
        start, end = end, end + 2 * math.prod(piece.shape)
        header[piece.name] = {"dtype": "BF16", "shape": piece.shape, "data_offsets": [start, end]}
    words = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        file.truncate(8 + len(words) + end)
    return tmp_path


def private(pid: int) -> int:
    """Bytes of anonymous and shared memory of a process; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def test_peak_is_under_its_own_share_and_600_megabytes(large: Path) -> None:
    """A rank that held its slices twice for a moment, or another's beside its own, would be over it."""
    peaks: dict[int, int] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            pids = list(peaks) if len(peaks) == 2 else ranks_of(os.getpid())
            peaks.update({pid: max(peaks.get(pid, 0), private(pid)) for pid in pids})

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with LLM(large, tensor_parallel_size=2, kv_cache_memory=100 << 20) as llm:
            llm.generate([list(range(300))], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    finally:
        done.set()
        watcher.join()
    share = (large / "model.safetensors").stat().st_size / 2
    assert len(peaks) == 2 and share > 750e6
    for peak in peaks.values():
        assert share < peak < 1.3 * share + 600e6


def test_memory_is_flat_over_ten_rounds_of_three_hundred_requests(tmp_path: Path) -> None:
    """In the caller and in the ranks. The first rounds fill the cache and what the allocator keeps."""
    draw, used = np.random.default_rng(0), []
    with LLM(save(FAMILIES[0], tmp_path), tensor_parallel_size=2, kv_cache_memory=2 << 20) as llm:
        for _ in range(10):
            prompts = [draw.integers(3, 509, size=int(draw.integers(1, 40))).tolist() for _ in range(300)]
            params = [
                SamplingParams(max_tokens=1 + i % 4, temperature=float(i % 2), logprobs=2 if i % 7 == 0 else None)
                for i in range(300)
            ]
            llm.generate(prompts, params, progress=False)
            used.append([private(pid) for pid in (os.getpid(), *llm.pids)])
        assert llm.stats()[-1].free_blocks == llm.num_blocks
    for before, after in zip(used[4], used[-1], strict=True):
        assert after - before < 1e6, used  # of 1500 requests
