"""vLLM's own model classes, each with one mixin before it."""

from typing import Any

import torch
from vllm.model_executor.models.llama import LlamaForCausalLM as Llama
from vllm.model_executor.models.mixtral import MixtralForCausalLM as Mixtral
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM as Qwen2
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM as Qwen3

from tokenweave.integrations.vllm.install import install
from tokenweave.integrations.vllm.neighbours import let_vllm_look_at_llvmlite
from tokenweave.integrations.vllm.weave import woven

let_vllm_look_at_llvmlite()  # which is loaded now, for the next engine of this process


class TokenWeave:
    """Changes the stock model once it is built. Its inner model, which vLLM compiles, keeps its own forward; this outer
    one is not compiled, and takes over only for a step that is woven."""

    model: Any

    def __init__(self, *, vllm_config: Any, prefix: str = "", **options: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **options)  # type: ignore[call-arg]
        self.tokenweave = install(self.model, vllm_config)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        runtime = self.tokenweave
        step = None if runtime is None else runtime.begin()
        if runtime is None or step is None or step.lanes is None:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)  # type: ignore[misc]
        embedded = self.model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return woven(runtime, step, embedded, positions)


class LlamaForCausalLM(TokenWeave, Llama):
    pass


class Qwen2ForCausalLM(TokenWeave, Qwen2):
    pass


class Qwen3ForCausalLM(TokenWeave, Qwen3):
    pass


class MixtralForCausalLM(TokenWeave, Mixtral):
    pass
