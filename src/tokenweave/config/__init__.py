"""Frozen, self-validating descriptions of a model and of a rank's part of it."""

from tokenweave.config.model import ExpertsConfig, ModelConfig
from tokenweave.config.rope import RopeConfig
from tokenweave.config.sharding import Shard, partition, shard

__all__ = ["ExpertsConfig", "ModelConfig", "RopeConfig", "Shard", "partition", "shard"]
