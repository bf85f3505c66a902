"""A model whose weights are drawn: of the right size and speed, for benchmarks of models that are not there."""

from pathlib import Path

import torch

from tokenweave.config import shard
from tokenweave.config.foreign import read_config
from tokenweave.models.decoder import Decoder


def random_model(directory: str | Path, *, rank: int, size: int, dtype: torch.dtype, device: str = "cpu") -> Decoder:
    """Rank `rank`'s part of the model that config.json in `directory` describes, by `randomise`."""
    config = read_config(directory)
    model = Decoder(config, shard(config, size, rank), dtype=dtype, device=device)
    randomise(model, seed=rank)
    return model


@torch.no_grad()
def randomise(model: Decoder, seed: int = 0) -> None:
    """Fill every parameter so that activations keep a normal size: matrices as 1 / sqrt(inputs), norms near one.

    seed: of what a rank holds a part of. Norms and routers are alike on all ranks whatever it is: ranks choose the same
    experts, and norm the same rows alike.
    """
    own, alike = (torch.Generator(model.device).manual_seed(number) for number in (seed, 0))
    for name, parameter in model.named_parameters():
        generator = alike if "norm" in name or name.endswith("router") else own
        if parameter.dim() > 1:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        elif "norm" in name:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0.0, 0.1, generator=generator)
