"""How a step is to run, decided where vLLM builds its attention metadata: there its requests are known."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.distributed.parallel_state import is_global_first_rank
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.ubatch_utils import maybe_create_ubatch_slices, split_attn_metadata

from tokenweave.integrations.vllm import MODELS
from tokenweave.integrations.vllm.runtime import KEY, Runtime
from tokenweave.plan.step import StepPlan

logger = init_logger("vllm.tokenweave")


@dataclass(frozen=True)
class Step:
    """plan: of the whole step. lanes: attention metadata of tokens [0, plan.cut) and of the rest; None if the step is
    not woven."""

    plan: StepPlan
    lanes: tuple[Any, Any] | None = None


def laned(backend: Any) -> Any:
    """A subclass of a stock attention backend whose builder adds a `Step`, as attribute `tokenweave`, to the metadata
    of a step that has requests."""

    class LanedBuilder(LaneBuilder, backend.get_builder_cls()):  # type: ignore[misc]
        stock = backend.get_builder_cls()

    class LanedBackend(backend):
        @staticmethod
        def get_builder_cls() -> type:
            return LanedBuilder

    return LanedBackend


class LaneBuilder:
    """Mixin before a stock metadata builder. A stock builder may keep buffers, so each lane has one of its own."""

    stock: type

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        layers = vllm_config.compilation_config.static_forward_context
        self._runtime: Runtime | None = layers.get(KEY)
        if vllm_config.model_config.architecture not in MODELS and is_global_first_rank():
            told = "TokenWeave is off: it is for %s, not for %s"
            logger.info_once(told, ", ".join(MODELS), vllm_config.model_config.architecture)
        self._lane_builders: list[Any] = []
        if self._runtime is None or not self._runtime.weaves:
            return
        # Lanes would need the metadata of every group of layers: only models with one group are woven.
        if {name for name, layer in layers.items() if isinstance(layer, Attention)} == set(layer_names):
            self._lane_builders = [self.stock(kv_cache_spec, layer_names, vllm_config, device) for _ in range(2)]

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        if self._runtime is not None:
            metadata.tokenweave = self._step(self._runtime, common_attn_metadata, common_prefix_len)
        return metadata

    def _step(self, runtime: Runtime, common: CommonAttentionMetadata, shared_prefix: int) -> Step | None:
        contexts = common.seq_lens_cpu_upper_bound
        if contexts is None:
            return None
        counts = np.diff(common.query_start_loc_cpu.numpy()[: common.num_reqs + 1])
        tokens = int(counts.sum())
        if not tokens or tokens != common.num_actual_tokens:  # a dummy step, or one padded for a captured graph
            return None
        plan = runtime.planned(counts, contexts.numpy()[: common.num_reqs])
        if plan.mode != "weave":
            return Step(plan)
        if not 0 < plan.cut < tokens or shared_prefix or not self._can_split(common):
            return Step(StepPlan("fused", budget=plan.budget))
        slices, _ = maybe_create_ubatch_slices(True, counts, tokens, common.num_reqs, 2, plan.cut)
        first, second = split_attn_metadata(slices, common)
        builders = self._lane_builders
        return Step(plan, (builders[0].build(0, first), builders[1].build(0, second)))

    def _can_split(self, common: CommonAttentionMetadata) -> bool:
        """split_attn_metadata keeps what a plain causal decoder needs, and drops these."""
        dropped = (
            common.logits_indices_padded, common.encoder_seq_lens, common.dcp_local_seq_lens,
            common.mm_req_doc_ranges, common.rswa_prefix_lens,
        )  # fmt: skip
        return bool(self._lane_builders) and common.causal is True and all(field is None for field in dropped)
