"""vLLM's attention backends, whose metadata builders also build what each lane of a woven step needs.

One name per backend, imported by vLLM when it takes that backend: the others' packages need not be there.
"""

from typing import Any

from tokenweave.integrations.vllm.lanes import laned

_STOCK = {
    "CPU_ATTN": ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackend"),
    "FLASH_ATTN": ("vllm.v1.attention.backends.flash_attn", "FlashAttentionBackend"),
}


def __getattr__(name: str) -> Any:
    if name not in _STOCK:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, stock = _STOCK[name]
    backend = globals()[name] = laned(getattr(import_module(module), stock))
    return backend
