"""What a family of models is: its differences from Llama, as data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenweave.config.fields import Fields, short
from tokenweave.config.model import ExpertsConfig

Windows = tuple[int | None, ...]


def no_windows(fields: Fields) -> Windows:
    return ()


def no_experts(fields: Fields) -> ExpertsConfig | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one architecture reads its config.json and names its tensors; left alone, as Llama does.

    A `bool | str` is the fact itself, or the name of the boolean field that decides.
    windows, experts: from the fields of a config.json, per layer.
    names: (part of a tensor's name as Llama and Qwen say it, what the family's checkpoints say there); applied in
    turn. Fused attention (qkv_proj) and MLP (gate_up_proj) tensors need no entry.
    fused: the family's own checkpoints have such, which matters where one is written.
    defaults: of fields that a config.json may leave out.
    """

    architecture: str
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    gated_mlp: bool = True
    windows: Callable[[Fields], Windows] = no_windows
    experts: Callable[[Fields], ExpertsConfig | None] = no_experts
    names: tuple[tuple[str, str], ...] = ()
    fused: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def tensor_name(self, name: str) -> str:
        """What the family's checkpoints call the tensor that Llama's or Qwen's call `name`."""
        for ours, theirs in self.names:
            name = name.replace(ours, theirs)
        return name


def windows_everywhere(fields: Fields) -> Windows:
    """`sliding_window` in every layer, where it is set."""
    window = fields.get("sliding_window")
    layers = fields.integer("num_hidden_layers")
    return () if window is None else (fields.integer("sliding_window"),) * layers


def windows_switched(fields: Fields) -> Windows:
    """`sliding_window` where `use_sliding_window` says so, in the layers of type "sliding_attention" or, where types
    are not given, from layer `max_window_layers` on."""
    on, layers = fields.switch("use_sliding_window"), fields.integer("num_hidden_layers")
    window, first = fields.get("sliding_window"), fields.integer("max_window_layers", 28)
    types = fields.get("layer_types", ["full_attention" if i < first else "sliding_attention" for i in range(layers)])
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise ValueError(
            f"layer_types {short(types)} is not supported; supported: for each of {layers} layers {' or '.join(known)}"
        )
    if not on or window is None:
        return ()
    return tuple(fields.integer("sliding_window") if kind == known[1] else None for kind in types)
