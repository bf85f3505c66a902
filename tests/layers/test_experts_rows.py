"""Numbers of rows that experts are trained on."""

import pytest
import torch
from torch.nn import functional as F

from tokenweave.config import ExpertsConfig, ModelConfig, shard
from tokenweave.layers.experts import Experts

CONFIG = ModelConfig(
    architecture="MixtralForCausalLM", vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=8,
    experts=ExpertsConfig(count=2, per_token=1, intermediate_size=24, layers=(True,), normalised=True),
)  # fmt: skip


@pytest.mark.parametrize(("rows", "padded"), [(1, 16), (3, 16), (17, 24), (24, 24), (33, 48), (49, 64), (577, 768)])
def test_rows_recur_and_padding_changes_nothing(rows: int, padded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    experts = Experts(CONFIG, shard(CONFIG, 1, 0), dtype=torch.bfloat16)
    gate_up, down = (torch.randn(s).mul(0.1).bfloat16().requires_grad_() for s in ((48, 16), (16, 24)))
    x = torch.randn(rows, 16).bfloat16().requires_grad_()
    seen: list[int] = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda a, *more: (seen.append(len(a)), linear(a, *more))[1])
    found = experts._run_one(0, gate_up, down, x)
    assert seen == [padded] * 2 and found.shape == (rows, 16)
    gradients = torch.autograd.grad(found.float().square().sum(), (x, gate_up, down))
    wide = [t.detach().double().requires_grad_() for t in (x, gate_up, down)]
    gate, up = (wide[0] @ wide[1].t()).chunk(2, 1)
    reference = (gate * gate.sigmoid() * up) @ wide[2].t()
    for ours, theirs in zip(gradients, torch.autograd.grad(reference.square().sum(), wide), strict=True):
        assert (ours.double() - theirs).norm() <= 0.02 * theirs.norm()
