"""Every shape that must work, block by block against transformers. The ranks are parts of the model in one process, and
what they would tell each other is a sum written out here."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import Tiny, build

from tokenweave.layers.batch import Batch
from tokenweave.models.decoder import Decoder
from tokenweave.models.loading import load_model

PROMPTS = [[3, 141, 59, 26, 5], [358, 97, 9], [32]]


def ranks(path: Path, size: int, dtype: torch.dtype = torch.float32) -> list[Decoder]:
    return [load_model(path, rank=rank, size=size, dtype=dtype) for rank in range(size)]


@torch.inference_mode()
def run(parts: list[Decoder], dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The residual behind every stage, and the logits."""
    batch, normed = Batch.prompts(PROMPTS), None
    residual, seen = torch.zeros(batch.num_tokens, parts[0].config.hidden_size, dtype=dtype), []
    for stages in zip(*(part.stages for part in parts), strict=True):
        total = sum(stage.compute(normed, batch, None).float() for stage in stages)
        residual = (total + residual).to(dtype)
        seen.append(residual)
        normed = stages[0].norm(residual)
    return seen, torch.cat([part.head(normed) for part in parts], dim=1)


@torch.no_grad()
def expected(model: torch.nn.Module) -> tuple[list[torch.Tensor], torch.Tensor]:
    """transformers' residual in front of every layer, and its logits, of each prompt by itself."""
    outputs = [model(torch.tensor([prompt]), output_hidden_states=True) for prompt in PROMPTS]
    layers = zip(*(output.hidden_states for output in outputs), strict=True)
    return [torch.cat(rows, 1)[0] for rows in layers], torch.cat([output.logits for output in outputs], 1)[0]


def far(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).abs().max() / exact.abs().max())


def shape(heads: int, kv_heads: int, **changes: int | bool | str) -> Tiny:
    name = changes.pop("config", "LlamaConfig")
    sizes = dict(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=4 * heads, num_hidden_layers=2)
    return Tiny("shape", str(name), sizes | dict(intermediate_size=29) | changes)


SHAPES = [  # model, ranks
    (shape(4, 2), (4,)),  # more ranks than KV heads
    (shape(2, 1), (2,)),
    (shape(9, 3), (2, 4, 5, 7, 9)),
    (shape(8, 2), (3, 5, 6, 8)),
    (shape(7, 7), (2, 3, 5, 6, 7)),
    (shape(12, 3, config="Qwen2Config"), (2, 5, 8, 11)),
    (shape(10, 5, config="Qwen3Config", head_dim=6), (3, 4, 7)),
    (shape(5, 1, config="MistralConfig", sliding_window=3), (3, 5)),
    (shape(6, 2, config="MixtralConfig", num_local_experts=3, num_experts_per_tok=2), (4, 5, 6)),
    (
        shape(6, 6, config="Qwen3MoeConfig", head_dim=4, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=7),
        (4, 5),
    ),
    (shape(6, 3, config="ArceeConfig", attention_bias=True, mlp_bias=True), (4, 6)),
    (shape(6, 3, config="Phi3Config", pad_token_id=0), (4, 5)),
    (shape(2, 2, vocab_size=32001), (2,)),
    (shape(5, 5, vocab_size=32064, tie_word_embeddings=True), (5,)),
    (shape(6, 2, vocab_size=151552), (6,)),
    (shape(4, 4, intermediate_size=4), (3, 4)),  # a column a rank
]


@pytest.mark.parametrize(("tiny", "sizes"), SHAPES, ids=lambda value: str(value)[:60])
def test_every_block_equals_transformers(tiny: Tiny, sizes: tuple[int, ...], tmp_path: Path) -> None:
    model = build(tiny)
    model.save_pretrained(tmp_path)
    layers, exact = expected(model)
    for size in (1, *sizes):
        parts = ranks(tmp_path, size)
        seen, logits = run(parts)
        for index, residual in enumerate(layers[:-1]):  # transformers gives the last one normed
            assert far(seen[2 * index], residual) < 1e-5, f"{size} ranks, in front of layer {index}"
        assert far(logits, exact) < 1e-4, f"{size} ranks"
        if size > 1:  # control: without what the last rank adds
            assert far(run(parts[:-1])[0][-1], seen[-1]) > 1e-2


@pytest.mark.parametrize("config", ["LlamaConfig", "Qwen3Config"])
def test_norms_in_float32_beside_bfloat16(config: str, tmp_path: Path) -> None:
    """As some checkpoints have them; head norms too."""
    model = build(shape(4, 2, config=config), torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    tensors = load_file(tmp_path / "half" / "model.safetensors")
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "config.json").write_bytes((tmp_path / "half" / "config.json").read_bytes())
    mixed = {name: tensor.float() if "norm" in name else tensor for name, tensor in tensors.items()}
    save_file(mixed, tmp_path / "mixed" / "model.safetensors")
    (_, half), (_, logits) = (
        run(ranks(tmp_path / name, 2, torch.bfloat16), torch.bfloat16) for name in ("half", "mixed")
    )
    assert torch.equal(half, logits) and logits.isfinite().all()
    parts = ranks(tmp_path / "mixed", 2, torch.bfloat16)
    for part in parts:  # and norms that stay in float32 beside bfloat16 rows
        for module in part.modules():
            if type(module).__name__ == "RMSNorm":
                module.weight.data = module.weight.data.float()
    assert torch.equal(run(parts, torch.bfloat16)[1], half)
