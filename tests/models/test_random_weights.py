"""Models of drawn weights: every parameter filled, activations of normal size, the same again for a seed."""

from pathlib import Path

import torch

from tokenweave import LLM, SamplingParams
from tokenweave.bench.dimensions import DIMENSIONS, model_directory
from tokenweave.config import ModelConfig, shard
from tokenweave.config.foreign import read_config
from tokenweave.models.decoder import Decoder
from tokenweave.models.random_weights import random_model, randomise

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=97, hidden_size=64, intermediate_size=72, num_hidden_layers=2,
    num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=128, qkv_bias=True,
)  # fmt: skip


def test_every_parameter_is_filled_and_of_normal_size() -> None:
    model = Decoder(CONFIG, shard(CONFIG, 1, 0), dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    randomise(model, seed=3)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        if parameter.dim() == 2:
            product = torch.randn(200, parameter.shape[1]) @ parameter.t()
            assert 0.8 < float(product.std()) < 1.25, name
    again = Decoder(CONFIG, shard(CONFIG, 1, 0), dtype=torch.float32)
    randomise(again, seed=3)
    assert all(a.equal(b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_what_all_ranks_hold_whole_is_alike_on_them(tmp_path: Path) -> None:
    """A router of its own on every rank would send a token to other experts on each."""
    text = model_directory("Mixtral-8x22B", layers=1).joinpath("config.json").read_text()
    facts = DIMENSIONS["Mixtral-8x22B"]
    for name, small in (("hidden_size", 96), ("intermediate_size", 72), ("vocab_size", 512)):
        text = text.replace(f'"{name}": {facts[name]}', f'"{name}": {small}')
    (tmp_path / "config.json").write_text(text)
    ranks = [random_model(tmp_path, rank=rank, size=2, dtype=torch.float32) for rank in range(2)]
    found = {}
    for (name, one), (_, other) in zip(*(rank.named_parameters() for rank in ranks), strict=True):
        found[name] = one.equal(other)
    assert [name for name, alike in found.items() if alike] == [
        "layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight", "layers.0.mlp.router",
        "norm.weight",
    ]  # fmt: skip


def test_dimensions_are_of_models_that_can_be_read_and_dealt_to_eight_ranks() -> None:
    for name, facts in DIMENSIONS.items():
        config = read_config(model_directory(name, layers=2))
        assert (config.hidden_size, config.num_hidden_layers, config.dtype) == (facts["hidden_size"], 2, "bfloat16")
        assert shard(config, 8, 7).num_kv_heads == 1


def test_an_engine_runs_without_weights(tmp_path) -> None:
    text = model_directory("Llama-3.1-8B", layers=1).joinpath("config.json").read_text()
    for name, small in (("hidden_size", 64), ("intermediate_size", 72), ("vocab_size", 512)):
        text = text.replace(f'"{name}": {DIMENSIONS["Llama-3.1-8B"][name]}', f'"{name}": {small}')
    (tmp_path / "config.json").write_text(text)
    assert random_model(tmp_path, rank=0, size=1, dtype=torch.float32).config.hidden_size == 64
    with LLM(tmp_path, device="cpu", weights="random", max_model_len=64, kv_cache_memory=1 << 24) as llm:
        answer = llm.generate([3, 1, 4], SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.0))[0]
    assert len(answer.token_ids) == 5
