"""Changes a stock vLLM model in place, or says why it is left as it is."""

import logging
from collections.abc import Iterator
from typing import Any

from vllm import envs
from vllm.config import CompilationMode
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear

from tokenweave.comm.collective import CommunicationError
from tokenweave.integrations.vllm.join import join
from tokenweave.integrations.vllm.operation import EagerLastRMSNorm, EagerReducingRMSNorm, ReducingRMSNorm
from tokenweave.integrations.vllm.planning import agree
from tokenweave.integrations.vllm.runtime import KEY, Block, Runtime
from tokenweave.integrations.vllm.settings import VARIABLE, Settings, obstacle

logger = init_logger("vllm.tokenweave")
# These draft tokens without a model; others read hidden states that are no longer there, or share names with the model.
DRAFTLESS = ("ngram", "ngram_gpu", "suffix")


def install(model: Any, vllm_config: Any) -> Runtime | None:
    """Make `model` (embed_tokens, layers, norm) run the fused operation; None if it stays as it is.

    Called once the model is built, before its weights are loaded and before memory is profiled: the buffers are counted
    as the model's own. All ranks come to the same answer.
    """
    settings = Settings.of_environment()
    ranks = get_tp_group()
    try:
        for reason in obstacles(model, vllm_config, settings):
            raise ValueError(reason)
        runtime, account = _runtime(model, vllm_config, settings)
    except (ValueError, CommunicationError) as error:
        expected = (
            settings.mode == "off"
            or ranks.world_size == 1
            or (vllm_config.device_config.device_type == "cuda" and not settings.asked)
        )
        if ranks.rank_in_group == 0:
            logger.log(logging.INFO if expected else logging.WARNING, "TokenWeave is off: %s", error)
        return None
    compiled = vllm_config.compilation_config.mode != CompilationMode.NONE
    _change(model, runtime, compiled=compiled)
    vllm_config.compilation_config.static_forward_context[KEY] = runtime
    # A graph compiled with these operations must not be taken from vLLM's cache by a start without them, or vice versa.
    vllm_config.additional_config[KEY] = "reducing norms"
    if ranks.rank_in_group == 0:
        logger.info("TokenWeave is on: %s", account)
    return runtime


def obstacles(model: Any, vllm_config: Any, settings: Settings) -> Iterator[str]:
    """Why the model is to be left as it is, in words."""
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    device = vllm_config.device_config.device_type
    if (reason := obstacle(settings)) is not None:
        yield reason  # it may have been turned off since vLLM's plugins were loaded
    if device not in ("cpu", "cuda"):
        yield f"it is for CPUs and GPUs of NVIDIA, not for {device}"
    if device == "cuda" and not settings.asked:
        yield f"it has not been run in vLLM on several GPUs yet; {VARIABLE}=auto turns it on"
    if parallel.tensor_parallel_size == 1:
        yield "one rank has nobody to communicate with"
    if parallel.pipeline_parallel_size > 1:
        yield "with pipeline parallelism the residual would have to be sent on whole"
    if parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        yield "context parallelism is not supported"
    if parallel.use_sequence_parallel_moe:
        yield "with sequence-parallel experts the rows are split already"
    if parallel.data_parallel_size > 1 and parallel.is_moe_model:
        yield "experts spread over data-parallel ranks reduce by themselves"
    if speculative is not None and speculative.method not in DRAFTLESS:
        yield f"speculative decoding by {speculative.method} reads hidden states that stay split over the ranks"
    if not isinstance(vllm_config.additional_config, dict):
        yield "additional_config is not a dictionary, so vLLM's cache of compiled graphs could mix them up"
    yield from _unknown_parts(model)


def _unknown_parts(model: Any) -> Iterator[str]:
    """Whatever in the model's layers is not as the stock classes make it."""
    for layer in model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            if type(norm) is not RMSNorm or not norm.has_weight or norm.variance_size_override is not None:
                yield f"a norm is {norm!r}"
        for linear in _row_parallel(layer):
            if not isinstance(linear, RowParallelLinear) or not linear.reduce_results or linear.skip_bias_add:
                yield f"a row-parallel layer is {linear!r}"
        if hasattr(layer, "block_sparse_moe"):
            config = layer.block_sparse_moe.experts.moe_config
            if config.moe_parallel_config.use_all2all_kernels or config.skip_final_all_reduce:
                yield "the experts do not leave their sum to an all-reduce"


def _row_parallel(layer: Any) -> list[Any]:
    return [layer.self_attn.o_proj] + ([layer.mlp.down_proj] if hasattr(layer, "mlp") else [])


def _runtime(model: Any, vllm_config: Any, settings: Settings) -> tuple[Runtime, str]:
    """The runtime, and one line that says what is on and why. All ranks call it together."""
    ranks, hf_config = get_tp_group(), vllm_config.model_config.hf_text_config
    dtype, max_tokens = vllm_config.model_config.dtype, vllm_config.scheduler_config.max_num_batched_tokens
    device = vllm_config.device_config.device_type
    joined = join(ranks, device, float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS))
    collective = joined.group.open_collective(hf_config.hidden_size, max_tokens, dtype, lanes=2)
    planning = agree(ranks, joined, collective, settings.mode, hf_config, dtype, max_tokens)
    against = _against_lanes(vllm_config)
    runtime = Runtime(joined.group, collective, planning.plan, weaves=against is None)
    lanes = f"no lanes, because {against}" if against else "lanes where the plan says so"
    return runtime, (
        f"{type(model).__name__} over {joined.how}, {ranks.world_size} ranks on {joined.hosts} "
        f"host{'s' * (joined.hosts > 1)}, up to {max_tokens} tokens a step; mode {settings.mode} ({planning.source}); "
        f"{lanes}"
    )


def _against_lanes(vllm_config: Any) -> str | None:
    if vllm_config.lora_config is not None:
        return "LoRA adapters are laid out over the whole step"
    if vllm_config.model_config.uses_mrope:
        return "positions have several axes"
    return None


def _change(model: Any, runtime: Runtime, *, compiled: bool) -> None:
    """The layers stop reducing, and the norms behind them do it."""
    layers = list(model.layers)
    norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    norms.append(model.norm)
    for norm in norms:
        norm.__class__ = ReducingRMSNorm if compiled else EagerReducingRMSNorm
    if not compiled:
        model.norm.__class__ = EagerLastRMSNorm
    for layer in layers:
        for linear in _row_parallel(layer):
            linear.reduce_results = False
        if hasattr(layer, "block_sparse_moe"):
            layer.block_sparse_moe.experts.moe_config.skip_final_all_reduce = True
    runtime.first_norm = norms[0]
    for layer, attention_norm, mlp_norm in zip(layers, norms[1::2], norms[2::2], strict=True):
        mlp = layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe
        runtime.blocks.append(Block(layer.self_attn, attention_norm, mlp, mlp_norm))
