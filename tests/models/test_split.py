"""batch.split through a whole model: attention of the second half reads what the first half wrote, layer by layer."""

import random
from dataclasses import replace

import pytest
import torch
from layers.layer_cases import DEMO, EVERYTHING, ONE_KV, Paged, paged

from tokenweave.config import ModelConfig, shard
from tokenweave.layers.batch import Batch
from tokenweave.models.decoder import Decoder

BATCHES = 200
CONFIGS = [EVERYTHING, DEMO, replace(ONE_KV, tie_word_embeddings=True)]


def model_of(config: ModelConfig) -> Decoder:
    model = Decoder(config, shard(config, 1, 0), dtype=torch.float32)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.uniform_(0.5, 1.5) if "norm" in name else parameter.data.normal_(0, 0.3)
    return model


@torch.inference_mode()
def logits(model: Decoder, batch: Batch) -> torch.Tensor:
    """The serial mode at one rank, in plain torch."""
    normed, residual = None, torch.zeros(batch.num_tokens, model.config.hidden_size)
    for stage in model.stages:
        residual = residual + stage.compute(normed, batch, None)
        scale = (residual.square().mean(1, keepdim=True) + stage.norm.eps).rsqrt()
        normed = residual * scale * stage.norm.weight
    return model.head(normed)


def random_case(draw: random.Random, config: ModelConfig) -> Paged:
    """Decodes, whole prompts and chunks of prompts, of a few tokens each."""
    news = [draw.choice([1, 1, 2, 3, draw.randint(1, 13)]) for _ in range(draw.randint(1, 5))]
    requests = [(new, new + draw.choice([0, 1, draw.randint(0, 40)])) for new in news]
    return paged(config, requests, block_size=draw.choice([1, 3, 4, 16]), seed=draw.randrange(1 << 30))


@pytest.mark.parametrize("config", CONFIGS, ids=["everything", "demo", "one kv head"])
def test_halves_one_after_the_other_give_the_unsplit_logits_at_every_cut(config: ModelConfig) -> None:
    model, heads, draw = model_of(config), slice(0, config.num_key_value_heads), random.Random(config.head_dim)
    for number in range(-(-BATCHES // len(CONFIGS))):
        case = random_case(draw, config)
        whole = logits(model, case.rank(heads))
        assert whole.isfinite().all()
        for cut in range(case.batch.num_tokens + 1):
            halves = torch.cat([logits(model, half) for half in case.rank(heads).split(cut)])
            error = ((halves - whole).abs().max() / whole.abs().max()).item()
            assert error < 1e-4, f"batch {number}, requests {case.requests}, cut {cut}: {error:.1e}"


def test_a_second_half_that_runs_first_is_seen() -> None:
    """The comparison's control: the order of the halves matters where a request is cut, and only there."""
    model, case = model_of(EVERYTHING), paged(EVERYTHING, [(4, 9), (3, 3)], block_size=4)
    whole = logits(model, case.rank(slice(0, 2)))
    for cut, right in ((4, True), (2, False), (5, False)):
        second, first = (logits(model, half) for half in reversed(case.rank(slice(0, 2)).split(cut)))
        error = (torch.cat((first, second)) - whole).abs().max()
        assert (error < 1e-4 * whole.abs().max()) == right
