"""TokenWeave inside stock vLLM, as a plugin: no fork, no edited model files (docs/vllm.md).

vLLM calls `register` in each of its processes, workers included. It replaces the classes of four architectures by
subclasses (`models`) and the attention backends by subclasses (`backends`), both by name, so that nothing heavy is
imported here. A model that is then built in a worker is changed by `install`, or left as it is with a line that says
why. What it needs at every step is a `Runtime`.
"""

import logging

from tokenweave.integrations.vllm.neighbours import let_vllm_look_at_llvmlite
from tokenweave.integrations.vllm.settings import Settings, obstacle

MODELS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM")
BACKENDS = ("CPU_ATTN", "FLASH_ATTN")
_PACKAGE = "tokenweave.integrations.vllm"


def register() -> None:
    """The entry point. May be called again; never raises because of what vLLM or the environment is like."""
    from multiprocessing import parent_process

    from vllm.logger import init_logger

    logger = init_logger("vllm.tokenweave")
    settings = Settings.of_environment()
    reason = obstacle(settings)
    if reason is not None:
        if parent_process() is None:  # the workers need not repeat it
            logger.log(logging.INFO if settings.mode == "off" else logging.WARNING, "TokenWeave is off: %s", reason)
        return
    let_vllm_look_at_llvmlite()  # if this process has it loaded already
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for architecture in MODELS:
        ModelRegistry.register_model(architecture, f"{_PACKAGE}.models:{architecture}")
    for backend in BACKENDS:
        register_backend(AttentionBackendEnum[backend], f"{_PACKAGE}.backends.{backend}")
