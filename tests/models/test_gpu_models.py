"""Tiny models of every family on GPUs against transformers, in every mode; several ranks share a GPU if they must."""

from pathlib import Path

import pytest
import torch
from models.gpu_ranks import run_models
from tiny import FAMILIES, Tiny, build, save

from tokenweave.comm import launch

PARTS = 4  # of the families: most of the time goes into compiling for each, which parts may do side by side
LIMITS = {torch.float32: 2e-4, torch.bfloat16: 0.03}  # of the logits' norm
PROMPT = [(7 * i + 3) % 500 for i in range(41)]
# Of other prompts, for mixtures of experts, such that no router's choice is close: bfloat16's rounding would turn one,
# and a token with another expert has other logits, not wrong ones.
SEEDS = {"mixtral": 295, "qwen3-moe": 396, "qwen3-moe-sums": 302}
CLEAR = 0.03  # between the last expert that is taken and the next, of the deviation of a token's router logits


def prompt(tiny: Tiny) -> list[int]:
    if tiny.name not in SEEDS:
        return PROMPT
    draw = torch.Generator().manual_seed(SEEDS[tiny.name])
    return torch.randint(3, 500, (len(PROMPT),), generator=draw).tolist()


@pytest.mark.parametrize("tiny", [tiny for tiny in FAMILIES if tiny.name in SEEDS], ids=lambda tiny: tiny.name)
def test_routers_decide_clearly(tiny: Tiny) -> None:
    ids, chosen = torch.tensor([prompt(tiny)]), []
    for dtype in (torch.float32, torch.bfloat16):
        model = build(tiny, dtype)
        with torch.no_grad():
            routers = model(ids, output_router_logits=True).router_logits
        count = model.config.num_experts_per_tok
        best = [logits.float().topk(count + 1) for logits in routers]
        chosen.append([found.indices[:, :count].sort().values for found in best])
        if dtype == torch.float32:
            for logits, found in zip(routers, best, strict=True):
                margin = found.values[:, count - 1] - found.values[:, count]
                assert (margin > CLEAR * logits.std(1)).all()
    assert all(torch.equal(exact, rounded) for exact, rounded in zip(*chosen, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_family_in_every_mode(size: int, part: int, tmp_path: Path) -> None:
    """float32 runs torch's operators where attention is; bfloat16 the kernels and graphs."""
    families = [tiny for tiny in FAMILIES[part::PARTS] if tiny.changes.get("num_attention_heads", 4) >= size]
    cases = [(save(tiny, tmp_path), prompt(tiny)) for tiny in families]
    dtypes = [torch.float32, torch.bfloat16]
    found = launch(run_models, size, device="cuda", args=(cases, dtypes), timeout=30.0)[0]
    wrong = []
    for tiny, (_, ids), ours in zip(families, cases, found, strict=True):
        with torch.no_grad():
            expected = build(tiny)(torch.tensor([ids])).logits[0]
        for (dtype, mode), logits in ours.items():
            error = float((logits - expected).norm() / expected.norm())
            if not error < LIMITS[dtype]:
                wrong.append(f"{tiny.name} {dtype} {mode}: {error:.4f}")
    assert not wrong, "\n".join(wrong)
