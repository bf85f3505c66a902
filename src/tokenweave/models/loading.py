"""From a checkpoint's directory to one rank's part of the model."""

from pathlib import Path

import torch

from tokenweave.config import shard
from tokenweave.config.foreign import read_config
from tokenweave.models.checkpoint import Checkpoint, load
from tokenweave.models.decoder import Decoder


def load_model(directory: str | Path, *, rank: int, size: int, dtype: torch.dtype, device: str = "cpu") -> Decoder:
    """Rank `rank`'s part of the model in `directory`, read slice by slice.

    Raises ValueError, in one line that says what to do, for a checkpoint that is absent, damaged or not supported,
    and for more ranks than the model can be dealt to.
    """
    config = read_config(directory)
    own = shard(config, size, rank)
    checkpoint = Checkpoint(directory)
    model = Decoder(config, own, dtype=dtype, device=device)
    load(model.pieces(), checkpoint, rank=rank)
    return model
