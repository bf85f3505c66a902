"""One decoder flattened to stages; families as differences; checkpoint loading and sharding."""

from tokenweave.models.decoder import Decoder
from tokenweave.models.loading import load_model
from tokenweave.models.stage import Stage

__all__ = ["Decoder", "Stage", "load_model"]
