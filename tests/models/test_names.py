"""Fused tensors: the cut of every part, at every rank, against the split checkpoint of the same model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import Tiny, save

from tokenweave.layers.pieces import Piece
from tokenweave.models.loading import load_model
from tokenweave.models.names import located

CASES = [  # H = 8, 4 query and 2 KV heads among them
    Tiny("small", "LlamaConfig", dict(hidden_size=8, intermediate_size=13, attention_bias=True, mlp_bias=True)),
    Tiny("uneven", "LlamaConfig", dict(num_attention_heads=9, num_key_value_heads=3, hidden_size=72)),
    Tiny("one kv head", "Qwen2Config", dict(num_key_value_heads=1)),
    Tiny("experts", "Qwen3MoeConfig", dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=7, head_dim=6)),
]


def fuse(path: Path, target: Path) -> Path:
    """The checkpoint with queries, keys and values in one tensor, and gates and ups in one."""
    tensors = load_file(path / "model.safetensors")
    for fused, labels in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
        for name in [name for name in tensors if f".{labels[0]}_proj." in name]:
            parts = [name.replace(f".{labels[0]}_proj.", f".{label}_proj.") for label in labels]
            whole = torch.cat([tensors.pop(part) for part in parts])
            tensors[name.replace(f".{labels[0]}_proj.", f".{fused}.")] = whole
    target.mkdir()
    (target / "config.json").write_bytes((path / "config.json").read_bytes())
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("tiny", CASES, ids=lambda tiny: tiny.name)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_fused_equals_split(tiny: Tiny, size: int, tmp_path: Path) -> None:
    split = save(tiny, tmp_path)
    fused = fuse(split, tmp_path / "fused")
    for rank in range(size):
        models = [load_model(path, rank=rank, size=size, dtype=torch.float32) for path in (split, fused)]
        for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert torch.equal(ours, theirs), name


def test_a_fused_tensor_of_another_size_is_named(tmp_path: Path) -> None:
    fused = fuse(save(CASES[0], tmp_path), tmp_path / "fused")
    tensors = load_file(fused / "model.safetensors")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    save_file(tensors | {name: tensors[name][:-1].clone()}, fused / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers.1.self_attn.qkv_proj.weight has shape \[15, 8\], .* \[16, 8\]"):
        load_model(fused, rank=0, size=1, dtype=torch.float32)


def test_what_is_nowhere_keeps_its_name() -> None:
    pieces = [Piece("a.q_proj.weight", (3, 2), torch.zeros(3, 2)), Piece("norm", (2,), torch.zeros(2))]
    assert located(pieces, ["b.qkv_proj.weight"]) == pieces
    assert located([], []) == []
