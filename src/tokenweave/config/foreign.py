"""Hugging Face config.json to ModelConfig. With the families' own few lines it is all that knows such files.

A field that would change results and that nobody reads is refused by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenweave.config.families import FAMILIES
from tokenweave.config.family import Family
from tokenweave.config.fields import Fields
from tokenweave.config.foreign_rope import rope_config, stretched
from tokenweave.config.model import ModelConfig

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu", "relu2": "relu2",
}  # fmt: skip


def read_config(directory: str | Path) -> ModelConfig:
    """The config of the checkpoint in `directory`; end-of-text ids from generation_config.json where it has some.

    Raises ValueError naming the file, and the field where one is unsupported, missing or malformed.
    """
    directory = Path(directory)
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} has no config.json; give the directory of a Hugging Face checkpoint")
    generation = directory / "generation_config.json"
    try:
        return model_config(read_json(path), read_json(generation) if generation.is_file() else {})
    except ValueError as error:
        raise ValueError(str(error) if str(directory) in str(error) else f"{path}: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def model_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """ModelConfig of a config.json, either in the form of transformers 5 or in an older one.

    Raises ValueError that names the field and what is supported.
    """
    family = family_of(config)
    fields = Fields(config, family.defaults)
    found = _read(fields, family, Fields(generation or {}))
    fields.refuse_unread()
    return found


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that a config.json names. Raises ValueError with all there are."""
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in FAMILIES:
        raise ValueError(f"architectures {named!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[named[0]]


def _read(fields: Fields, family: Family, generation: Fields) -> ModelConfig:
    heads, rope = fields.integer("num_attention_heads"), rope_config(fields)
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", fields.integer("hidden_size") // max(heads, 1)),
        max_position_embeddings=stretched(fields.integer("max_position_embeddings"), rope),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        windows=family.windows(fields),
        qkv_bias=fields.switch(family.qkv_bias),
        output_bias=fields.switch(family.output_bias),
        mlp_bias=fields.switch(family.mlp_bias),
        qk_norm=family.qk_norm,
        activation=_choice("hidden_act", fields.get("hidden_act", "silu"), ACTIVATIONS),
        gated_mlp=family.gated_mlp,
        experts=family.experts(fields),
        tie_word_embeddings=fields.switch("tie_word_embeddings"),
        dtype=_dtype(fields),
        bos_token_id=next(iter(generation.integers("bos_token_id") or fields.integers("bos_token_id")), None),
        eos_token_ids=generation.integers("eos_token_id") or fields.integers("eos_token_id"),
    )


def _dtype(fields: Fields) -> str:
    older = fields.get("torch_dtype", "float32")
    stored = str(fields.get("dtype", older)).removeprefix("torch.")
    return _choice("dtype", stored, {dtype: dtype for dtype in DTYPES})


def _choice(name: str, value: Any, allowed: Mapping[str, str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} {value!r} is not supported; supported: {', '.join(allowed)}")
    return allowed[value]
