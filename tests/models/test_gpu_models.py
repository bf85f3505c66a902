"""Tiny models of every family on GPUs against transformers, in every mode; several ranks share a GPU if they must."""

from pathlib import Path

import pytest
import torch
from models.gpu_ranks import run_models
from tiny import FAMILIES, build, save

from tokenweave.comm import launch

pytestmark = pytest.mark.gpu
PROMPT = [(7 * i + 3) % 500 for i in range(41)]
PARTS = 4  # of the families: most of the time goes into compiling for each, which parts may do side by side
LIMITS = {torch.float32: 2e-4, torch.bfloat16: 0.03}  # of the logits' norm


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_family_in_every_mode(size: int, part: int, tmp_path: Path) -> None:
    """float32 runs torch's operators where attention is; bfloat16 the kernels and graphs."""
    families = [tiny for tiny in FAMILIES[part::PARTS] if tiny.changes.get("num_attention_heads", 4) >= size]
    directories = [save(tiny, tmp_path) for tiny in families]
    found = launch(
        run_models, size, device="cuda", args=(directories, PROMPT, [torch.float32, torch.bfloat16]), timeout=30.0
    )[0]
    wrong = []
    for tiny, ours in zip(families, found, strict=True):
        with torch.no_grad():
            expected = build(tiny)(torch.tensor([PROMPT])).logits[0]
        for (dtype, mode), logits in ours.items():
            error = float((logits - expected).norm() / expected.norm())
            if not error < LIMITS[dtype]:
                wrong.append(f"{tiny.name} {dtype} {mode}: {error:.4f}")
    assert not wrong, "\n".join(wrong)
