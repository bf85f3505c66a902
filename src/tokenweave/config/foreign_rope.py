"""The rope parameters of a config.json, in the form of transformers 5 or an older one."""

import math
from typing import Any

from tokenweave.config.fields import Fields, short
from tokenweave.config.rope import RopeConfig

# What each type must have, besides rope_theta, and what it may have.
PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}


def rope_config(fields: Fields) -> RopeConfig:
    """Raises ValueError that names an unknown type, or a parameter that its type does not take or lacks."""
    scaling, given = fields.get("rope_scaling"), fields.get("rope_parameters")
    given = scaling or given or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"rope parameters {short(given)} are not supported; supported: one set for all layers")
    values = {key: value for key, value in given.items() if value is not None}
    older = values.pop("type", "default")
    kind = values.pop("rope_type", older)
    if kind not in PARAMETERS:
        raise ValueError(f"rope type {kind!r} is not supported; supported: {', '.join(PARAMETERS)}")
    theta, outside = fields.get("rope_theta", 10000.0), fields.get("original_max_position_embeddings")
    values.setdefault("rope_theta", theta)
    if values.pop("partial_rotary_factor", 1) != 1:
        raise ValueError(f"partial_rotary_factor {given['partial_rotary_factor']} is not supported; supported: 1")
    required, optional = PARAMETERS[kind]
    context = fields.integer("max_position_embeddings")
    if "original_max_position_embeddings" in required:
        values["original_max_position_embeddings"] = outside or values.get("original_max_position_embeddings", context)
    if kind == "yarn" and "original_max_position_embeddings" in given:
        values.setdefault("factor", context / values["original_max_position_embeddings"])
    names = set(required) | {"rope_theta"}
    if not names <= values.keys() <= names | set(optional):
        raise ValueError(
            f"rope type {kind!r} takes {', '.join(required) or 'no parameters'}"
            f"{' and may have ' + ', '.join(optional) if optional else ''}; "
            f"got {', '.join(sorted(values.keys() - {'rope_theta'})) or 'none'}"
        )
    return _checked(kind, values, context)


def _checked(kind: str, values: dict[str, Any], context: int) -> RopeConfig:
    parameters = Fields(values)
    truncate = parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ValueError(f"truncate must be true or false, got {truncate!r}")
    numbers = {key: parameters.number(key) for key in values if key != "truncate"}
    original = int(numbers.pop("original_max_position_embeddings", context if kind == "dynamic" else 0))
    theta, mscales = numbers.pop("rope_theta"), (numbers.pop("mscale", 0.0), numbers.pop("mscale_all_dim", 0.0))
    if kind == "yarn":
        numbers.setdefault("attention_factor", _attention_factor(numbers["factor"], *mscales))
    return RopeConfig(kind=kind, theta=theta, original_max_position_embeddings=original, truncate=truncate, **numbers)


def _attention_factor(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """Yarn's temperature, arXiv 2309.00071, equation 15, as a factor of cos and sin."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def stretched(context: int, rope: RopeConfig) -> int:
    """Positions that a model trained for `context` reaches with its rope: llama3's number has the stretching in it."""
    if rope.kind == "yarn":
        return max(context, int(rope.original_max_position_embeddings * rope.factor))
    return max(context, int(context * rope.factor)) if rope.kind in ("linear", "dynamic") else context
