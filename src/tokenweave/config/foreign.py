"""Hugging Face config.json to ModelConfig: the one place that reads it.

An architecture is a row of FAMILIES. A field that would change results and that no row reads is refused by name.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenweave.config.model import ModelConfig, RopeConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one architecture reads its config; a string names the boolean field that decides."""

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window_switch: str | None = None  # the field without which `sliding_window` means nothing
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that a config.json may leave out


_LLAMA_IDS = {"bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "LlamaForCausalLM": Family(
        qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias", defaults=_LLAMA_IDS
    ),
    "MistralForCausalLM": Family(defaults=_LLAMA_IDS | {"num_key_value_heads": 8, "sliding_window": 4096}),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window_switch="use_sliding_window"),
    "Qwen3ForCausalLM": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        window_switch="use_sliding_window",
        defaults={"head_dim": 128},
    ),
}

ACTIVATIONS = ("silu",)
DTYPES = ("float32", "bfloat16", "float16")

# What each rope type takes besides rope_theta.
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

# Fields of related models and of derived checkpoints that change results, with the values at which they do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "auto_map": (None, {}),  # code of the checkpoint's own
    "partial_rotary_factor": (None, 1),
    "attention_multiplier": (None,),
    "residual_multiplier": (None, 1),
    "embedding_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_chunk_size": (None,),
    "clip_qkv": (None,),
    "alibi": (None, False),
    "no_rope_layers": (None, []),
    "position_embedding_type": (None, "rope", "rotary"),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "is_causal": (None, True),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "use_parallel_residual": (None, False),
    "parallel_attn": (None, False),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "pruned_heads": (None, {}),
}


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
    name = _architecture(config)
    family = FAMILIES[name]
    config = {**family.defaults, **config}
    _refuse_unsupported(config, family)
    heads = _integer(config, "num_attention_heads")
    ids = {**config, **{key: value for key, value in (generation or {}).items() if value is not None}}
    return ModelConfig(
        architecture=name,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=_integer(config, "hidden_size"),
        intermediate_size=_integer(config, "intermediate_size"),
        num_hidden_layers=_integer(config, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=_integer(config, "num_key_value_heads", heads),
        head_dim=_integer(config, "head_dim", _integer(config, "hidden_size") // max(heads, 1)),
        max_position_embeddings=_integer(config, "max_position_embeddings"),
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope=_rope(config),
        qkv_bias=_switch(config, family.qkv_bias),
        output_bias=_switch(config, family.output_bias),
        mlp_bias=_switch(config, family.mlp_bias),
        qk_norm=family.qk_norm,
        tie_word_embeddings=_switch(config, "tie_word_embeddings"),
        dtype=_dtype(config),
        bos_token_id=next(iter(_token_ids(ids, "bos_token_id")), None),
        eos_token_ids=_token_ids(ids, "eos_token_id"),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in FAMILIES:
        raise ValueError(f"architectures {named!r} is not supported; supported: {', '.join(FAMILIES)}")
    return named[0]


def _refuse_unsupported(config: Mapping[str, Any], family: Family) -> None:
    for name, neutral in NEUTRAL.items():
        if config.get(name) not in neutral:
            raise ValueError(f"{name} {_short(config[name])} is not supported; supported: {_alternatives(neutral)}")
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ValueError(f"hidden_act {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    kinds = config.get("layer_types") or []
    if any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"layer_types {sorted(set(map(str, kinds)))} are not supported; supported: full_attention")
    _refuse_window(config, family.window_switch)


def _refuse_window(config: Mapping[str, Any], switch: str | None) -> None:
    """A window over all of the context is none."""
    window = config.get("sliding_window")
    off = window is None if switch is None else not _switch(config, switch)
    if off or window is not None and _integer(config, "sliding_window") >= _integer(config, "max_position_embeddings"):
        return
    name = switch or "sliding_window"
    allowed = "false" if switch else "null, or at least max_position_embeddings"
    raise ValueError(f"{name} {_short(config[name])} is not supported; supported: {allowed}")


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"rope parameters {_short(given)} are not supported; supported: one set for all layers")
    values = {key: value for key, value in given.items() if value is not None}
    older = values.pop("type", "default")
    kind = values.pop("rope_type", older)
    if kind not in ROPE_FIELDS:
        raise ValueError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_FIELDS)}")
    theta = values.pop("rope_theta", config.get("rope_theta", 10000.0))
    if values.pop("partial_rotary_factor", 1) != 1:
        raise ValueError(f"partial_rotary_factor {given['partial_rotary_factor']} is not supported; supported: 1")
    if "original_max_position_embeddings" in ROPE_FIELDS[kind]:
        context = config.get("original_max_position_embeddings")
        values.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        values |= {} if context is None else {"original_max_position_embeddings": context}
    wanted = set(ROPE_FIELDS[kind])
    if values.keys() != wanted:
        raise ValueError(
            f"rope type {kind!r} takes {', '.join(sorted(wanted)) or 'no parameters'}; got {', '.join(sorted(values))}"
        )
    values["rope_theta"] = theta
    numbers = {key: _number(values, key) for key in values}
    context = numbers.pop("original_max_position_embeddings", 0)
    return RopeConfig(
        kind=kind, theta=numbers.pop("rope_theta"), original_max_position_embeddings=int(context), **numbers
    )


def _dtype(config: Mapping[str, Any]) -> str:
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = str(stored).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {stored!r} is not supported; supported: {', '.join(DTYPES)}")
    return dtype


def _token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(_integer({key: item}, key) for item in ids)


def _switch(config: Mapping[str, Any], by: bool | str) -> bool:
    if isinstance(by, bool):
        return by
    value = config.get(by)
    if value not in (None, True, False):
        raise ValueError(f"{by} must be true or false, got {value!r}")
    return bool(value)


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise ValueError(f"{key} is missing")
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} must be an integer, got {value!r}")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise ValueError(f"{key} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} must be a number, got {value!r}")
    return float(value)


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _alternatives(values: tuple[Any, ...]) -> str:
    return "leaving it out" if values == (None,) else ", ".join(json.dumps(v) for v in values if v is not None)
