"""What a run starts from: a config.json or a model, refused before anything is written where it cannot work."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenweave.config import ModelConfig, shard
from tokenweave.config.foreign import model_config, read_config, read_json

LEAST_VOCABULARY = 257  # the bytes and the end of text
_SAMPLE, _EVERY = 1 << 12, 1 << 20  # bytes of weights that count in a digest, and how far apart


@dataclass(frozen=True)
class Start:
    """fields: of its config.json. digest: of it, and of a model's tokenizer and of 4 KB in each MB of its weights."""

    fields: dict[str, Any]
    config: ModelConfig
    digest: str

    def check(self, length: int, ranks: int) -> None:
        """Raises ValueError for windows longer than the model's context, or too many ranks."""
        if length > self.config.max_position_embeddings:
            raise ValueError(
                f"length {length} is more than the model's max_position_embeddings, "
                f"{self.config.max_position_embeddings}"
            )
        shard(self.config, ranks, 0)


def from_config(path: Path) -> Start:
    """New weights. Raises ValueError naming the file."""
    fields = read_json(path)
    try:
        config = model_config(fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if config.vocab_size < LEAST_VOCABULARY:
        raise ValueError(
            f"{path}: vocab_size must be at least {LEAST_VOCABULARY}, the bytes and the end of text, "
            f"got {config.vocab_size}"
        )
    return Start(fields, config, _canonical(fields).hexdigest())


def from_model(directory: Path) -> Start:
    """A model that is trained further. Raises ValueError that names what its directory lacks."""
    fields, config = read_json(directory / "config.json"), read_config(directory)
    weights = sorted(directory.glob("*.safetensors"))
    for name, there in (("tokenizer.json", (directory / "tokenizer.json").is_file()), ("*.safetensors", weights)):
        if not there:
            raise ValueError(f"{directory} has no {name}; training needs a model's tokenizer and weights")
    digest = _canonical(fields)
    digest.update(hashlib.sha256((directory / "tokenizer.json").read_bytes()).digest())
    for path in weights:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            for place in range(0, size, _EVERY):
                file.seek(place)
                digest.update(file.read(_SAMPLE))
    return Start(fields, config, digest.hexdigest())


def _canonical(fields: dict[str, Any]) -> "hashlib._Hash":
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
