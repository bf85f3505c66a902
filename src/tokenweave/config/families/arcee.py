"""Arcee's AFM: Llama with a plain MLP, down(activation(up(x)))."""

from tokenweave.config.families import llama
from tokenweave.config.family import Family

FAMILY = Family(
    architecture="ArceeForCausalLM",
    qkv_bias=llama.FAMILY.qkv_bias,
    output_bias=llama.FAMILY.output_bias,
    mlp_bias=llama.FAMILY.mlp_bias,
    gated_mlp=False,
    defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "bos_token_id": 128000, "eos_token_id": 128001},
)
