"""Mixtral: experts in every layer, with tensor names of its own."""

from tokenweave.config.families.llama import IDS
from tokenweave.config.family import Family, windows_everywhere
from tokenweave.config.fields import Fields
from tokenweave.config.model import ExpertsConfig


def experts(fields: Fields) -> ExpertsConfig:
    return ExpertsConfig(
        count=fields.integer("num_local_experts"),
        per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        normalised=True,
        layers=(True,) * fields.integer("num_hidden_layers"),
    )


FAMILY = Family(
    architecture="MixtralForCausalLM",
    windows=windows_everywhere,
    experts=experts,
    names=((".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."), (".down_proj.", ".w2."), (".up_proj.", ".w3.")),
    defaults=IDS
    | {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
    },
)
