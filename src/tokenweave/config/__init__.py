"""Frozen, self-validating descriptions of a model and of a rank's part of it."""

from tokenweave.config.model import ModelConfig, RopeConfig
from tokenweave.config.sharding import Shard, partition, shard

__all__ = ["ModelConfig", "RopeConfig", "Shard", "partition", "shard"]
