"""Mistral 7B and its successors with one window for all layers, or none."""

from tokenweave.config.families.llama import IDS
from tokenweave.config.family import Family, windows_everywhere

FAMILY = Family(
    architecture="MistralForCausalLM",
    windows=windows_everywhere,
    defaults=IDS | {"num_key_value_heads": 8, "sliding_window": 4096},
)
