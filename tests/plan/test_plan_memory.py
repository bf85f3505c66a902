from dataclasses import replace

import pytest
import torch
from known_models import LLAMA_70B, MIXTRAL_8X22B, SMOLLM

from tokenweave.config import shard
from tokenweave.config.model import ExpertsConfig
from tokenweave.models.decoder import Decoder
from tokenweave.plan.memory import inference_memory, kv_bytes_per_token, rank_parameters, training_memory

SMALL = replace(
    SMOLLM, vocab_size=101, hidden_size=36, intermediate_size=77, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, head_dim=8,
)  # fmt: skip
EXPERTS = ExpertsConfig(count=5, per_token=2, intermediate_size=31, normalised=True, layers=())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": False}, {"qkv_bias": True}, {"output_bias": True, "mlp_bias": True},
     {"qk_norm": True}, {"gated_mlp": False, "mlp_bias": True, "activation": "relu2"},
     {"experts": replace(EXPERTS, layers=(True,) * 3)}, {"experts": replace(EXPERTS, layers=(False, True, False))}],
)  # fmt: skip
def test_parameters_are_those_of_the_model(size, changes):
    config = replace(SMALL, **changes)
    for rank in range(size):
        part = shard(config, size, rank)
        model = Decoder(config, part, dtype=torch.float32)
        held = {id(p): p.numel() for p in model.parameters()}  # tied weights once
        assert rank_parameters(config, part) == sum(held.values())


def test_llama_70b_has_its_70_billion():
    assert rank_parameters(LLAMA_70B, shard(LLAMA_70B, 1, 0)) == 70_553_706_496


def test_mixtral_8x22b_has_its_141_billion():
    """And of its activations most are rows on their way to two experts each."""
    assert rank_parameters(MIXTRAL_8X22B, shard(MIXTRAL_8X22B, 1, 0)) == 140_630_071_296
    found = inference_memory(MIXTRAL_8X22B, 8, element=2, step_tokens=1000, kv_tokens=0)
    assert found.activations == 1000 * 2 * (2 * (4 * 2048 + 2 * 6144) + 6144 // 8)


def test_training_takes_16_bytes_a_parameter_and_20_with_float32_gradients():
    parameters = rank_parameters(LLAMA_70B, shard(LLAMA_70B, 8, 0))
    assert training_memory(LLAMA_70B, 8).total == 16 * parameters
    assert training_memory(LLAMA_70B, 8, float32_gradients=True).total == 20 * parameters


def test_inference_parts():
    memory = inference_memory(LLAMA_70B, 8, element=2, step_tokens=8192, kv_tokens=1000)
    assert memory.weights == 2 * rank_parameters(LLAMA_70B, shard(LLAMA_70B, 8, 0))
    assert memory.kv_cache == 1000 * 80 * 2 * 1 * 128 * 2
    assert memory.communication_buffers == 2 * 8192 * 8192 * 2
    assert memory.activations == 8192 * 4 * 3584 * 2 + 1024 * 8192 * 2
    assert memory.total == sum(v for v in vars(memory).values())
    assert inference_memory(LLAMA_70B, 1, element=2, step_tokens=1, kv_tokens=0).communication_buffers == 0


def test_the_cache_stops_shrinking_at_one_kv_head():
    one = replace(SMALL, num_attention_heads=8, num_key_value_heads=1)
    assert len({kv_bytes_per_token(one, size, 4) for size in (1, 2, 3, 8)}) == 1
    assert kv_bytes_per_token(SMALL, 2, 4) * 2 == kv_bytes_per_token(SMALL, 1, 4) == 3 * 2 * 2 * 8 * 4
