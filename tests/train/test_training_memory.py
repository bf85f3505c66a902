"""What training takes of a rank's memory, as the system counts it, beside the plan's account."""

from dataclasses import replace
from typing import Any

import pytest
from train.memory_ranks import left_open

from tokenweave.comm import launch
from tokenweave.comm.processes import start_ranks
from tokenweave.config import ExpertsConfig, ModelConfig
from tokenweave.plan.training import TrainingPlan, plan_training
from tokenweave.train.config import TrainingConfig, head_chunk
from tokenweave.train.heap import memory_settings
from tokenweave.train.memory import MeasuredMemory

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=4096, hidden_size=512, intermediate_size=1408, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=512,
)  # fmt: skip
DEEP = replace(CONFIG, hidden_size=256, intermediate_size=688, num_attention_heads=4, num_hidden_layers=8)
WORDS = replace(CONFIG, vocab_size=24001, num_hidden_layers=1, num_key_value_heads=1, tie_word_embeddings=True)
SPARSE = replace(
    CONFIG, architecture="MixtralForCausalLM", num_hidden_layers=2, intermediate_size=704,
    experts=ExpertsConfig(count=4, per_token=2, intermediate_size=704, layers=(True, True), normalised=True),
)  # fmt: skip
THIN = replace(
    SPARSE, vocab_size=1000, hidden_size=256, intermediate_size=200, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, tie_word_embeddings=True,
    experts=ExpertsConfig(count=4, per_token=2, intermediate_size=200, layers=(True,) * 3, normalised=True),
)  # fmt: skip
EXAMPLE = replace(
    CONFIG, vocab_size=1024, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip


def planned(config: ModelConfig, size: int, training: TrainingConfig, device: str = "cpu") -> TrainingPlan:
    return plan_training(
        config, size, tokens=training.tokens, dtype=training.dtype, wide_gradients=training.accumulation > 1,
        head_tokens=head_chunk(training.tokens, config.vocab_size), recompute=training.recompute,
        sequence_parallel=training.sequence_parallel, device=device,
    )  # fmt: skip


@pytest.mark.started  # glibc reads how its heap is to behave when a process starts
@pytest.mark.parametrize(
    ("config", "size", "settings"),
    [
        (CONFIG, 1, {"batch_size": 4}),
        (CONFIG, 3, {}),
        (CONFIG, 2, {"sequence_parallel": False, "dtype": "bfloat16"}),
        (CONFIG, 2, {"recompute": True}),
        (CONFIG, 2, {"batch_size": 2, "accumulation": 2}),  # most of it in small blocks
        (DEEP, 2, {"length": 128, "recompute": True}),
        (SPARSE, 2, {"batch_size": 4}),
        (SPARSE, 2, {"dtype": "bfloat16", "batch_size": 4, "steps": 6}),
        (THIN, 3, {"dtype": "bfloat16", "batch_size": 4, "length": 128, "accumulation": 4, "sequence_parallel": False}),
        (WORDS, 2, {"dtype": "bfloat16", "batch_size": 4, "accumulation": 2}),
        (EXAMPLE, 2, {"dtype": "bfloat16", "batch_size": 16, "length": 128, "steps": 40}),  # gaps could grow
    ],
)
def test_plan_and_measurement(config: ModelConfig, size: int, settings: dict[str, Any]) -> None:
    training = TrainingConfig(**({"steps": 2, "batch_size": 8, "length": 256} | settings))
    plan = planned(config, size, training)
    with start_ranks(
        "train.memory_ranks:train", size, (config, training),
        collective="shared_memory", threads=1, environment=memory_settings(training.dtype),
    ) as started:  # fmt: skip
        ranks: list[MeasuredMemory] = started.results()
    states = max(m.weights + m.gradients + m.optimizer for m in ranks)
    peak = max(m.peak for m in ranks)
    said = f"states {states / 1e6:.1f} of {plan.states / 1e6:.1f}, peak {peak / 1e6:.1f} of {plan.peak / 1e6:.1f} MB"
    print(said, plan)
    assert states == pytest.approx(plan.states, rel=0.05), said
    assert peak == pytest.approx(plan.peak, rel=0.15), said


def test_what_warms_up_leaves_no_collective_open() -> None:
    assert launch(left_open, 2, args=(TrainingConfig(),)) == [(3, [])] * 2


def test_parts_of_the_plan() -> None:
    training = TrainingConfig(batch_size=8, length=256)
    plan = planned(CONFIG, 2, training)
    assert plan.states == 16 * plan.memory.weights // 4
    assert planned(CONFIG, 2, replace(training, recompute=True)).activations < plan.activations / 4
    assert planned(CONFIG, 2, replace(training, sequence_parallel=False)).activations > plan.activations
    assert plan.peak == plan.states + plan.activations + max(plan.head, plan.backward) + _of_a_process(plan)
    assert plan.gaps < planned(CONFIG, 2, replace(training, batch_size=2)).gaps * 2


def _of_a_process(plan: TrainingPlan) -> int:
    return plan.gaps + plan.libraries + plan.buffers


def test_a_gpus_plan_is_of_tensors_alone() -> None:
    training = TrainingConfig(batch_size=8, length=256, dtype="bfloat16")
    cpu, gpu = (planned(CONFIG, 2, training, device=device) for device in ("cpu", "cuda"))
    assert gpu.states == cpu.states and _of_a_process(gpu) == 0
    assert gpu.peak == cpu.peak - _of_a_process(cpu)
