"""The registry: a family is a file here and a line below (docs/adding-a-model.md)."""

from tokenweave.config.families import arcee, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe, seed_oss
from tokenweave.config.family import Family

_MODULES = (llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, arcee, phi3, seed_oss)

FAMILIES: dict[str, Family] = {module.FAMILY.architecture: module.FAMILY for module in _MODULES}
