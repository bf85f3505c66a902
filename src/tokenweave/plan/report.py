"""What `tokenweave plan` says, as rows: from a model and facts about hardware."""

from dataclasses import asdict, dataclass
from typing import Any

from tokenweave.config import ModelConfig, Shard
from tokenweave.config.sharding import rank_work
from tokenweave.plan.analytical import AnalyticalCosts, Matmul
from tokenweave.plan.choose import Choice, choose
from tokenweave.plan.costs import LAYER
from tokenweave.plan.hardware import Hardware
from tokenweave.plan.memory import inference_memory, kv_bytes_per_token, rank_parameters, training_memory
from tokenweave.plan.pipeline import predict_pipeline
from tokenweave.plan.shape import StepShape
from tokenweave.plan.step import MODES

NORM_PASSES = {"serial": 5, "fused": 2}  # times a row of activations crosses memory between two stages


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be planned: prefill steps of `tokens` each, after `context` cached tokens of the same request.

    kv_tokens: tokens the KV cache is to hold, by default one request of the model's full context.
    """

    config: ModelConfig
    hardware: Hardware
    tensor_parallel_size: int
    tokens: tuple[int, ...]
    context: int = 0
    dtype: str = "bfloat16"
    kv_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1:
            raise ValueError(f"tokens must be numbers of at least 1, got {list(self.tokens)}")
        if self.context < 0 or (self.kv_tokens is not None and self.kv_tokens < 0):
            raise ValueError(f"context and kv-tokens must not be negative, got {self.context} and {self.kv_tokens}")

    @property
    def costs(self) -> AnalyticalCosts:
        return AnalyticalCosts(self.config, self.hardware, self.tensor_parallel_size, self.dtype)


def step_row(costs: AnalyticalCosts, tokens: int, context: int) -> dict[str, Any]:
    """One step: where a serial step's time goes, what fusing saves, waves, the choice and every mode's prediction."""
    shape = StepShape.prefill(tokens, context)
    load, stages = shape.load(), 1 + 2 * costs.layers
    choice = choose(costs, shape)
    parts = [(1, costs.parts("embed", load))] + [(costs.layers, costs.parts(stage, load)) for stage in LAYER]
    seconds = {
        "matmul": sum(n * part.matmul for n, part in parts) + costs.head(load.rows),
        "attention": sum(n * part.attention for n, part in parts),
        "norm": stages * costs.norm(tokens),
        "elementwise": sum(n * part.elementwise for n, part in parts),
        "communication": stages * costs.all_reduce(tokens),
    }
    total = sum(seconds.values())
    woven = choice.by_mode.get("weave")
    return {
        "tokens": tokens,
        "context": context,
        "serial_ms": {name: s * 1e3 for name, s in seconds.items()},
        "serial_share": {name: s / total for name, s in seconds.items()},
        "norm_rows_per_rank": {"serial": tokens, "fused": -(-tokens // costs.size)},
        "norm_memory_passes": NORM_PASSES,
        "waves": _waves(costs, shape, woven[0].cut if woven else 0),
        "mode": choice.plan.mode,
        "cut": choice.plan.cut,
        "budget": choice.plan.budget,
        "reason": choice.reason,
        "predicted_ms": {mode: choice.by_mode[mode][1].seconds * 1e3 for mode in MODES if mode in choice.by_mode},
        "hidden_ms": choice.prediction.hidden * 1e3,
        "exposed_ms": choice.prediction.exposed * 1e3,
    }


def balance_rows(costs: AnalyticalCosts) -> list[dict[str, Any]]:
    """What each rank is dealt. work: of all layers' matmuls, as a multiple of the mean."""
    works = [rank_work(costs.config, part) for part in costs.shards]
    return [
        {
            "rank": part.rank,
            "query_heads": part.num_query_heads,
            "kv_heads": part.num_kv_heads,
            **_columns(costs.config, part),
            "vocabulary_rows": part.vocab_rows.stop - part.vocab_rows.start,
            "parameters": rank_parameters(costs.config, part),
            "work": round(work * costs.size / sum(works), 4),
        }
        for part, work in zip(costs.shards, works, strict=True)
    ]


def _columns(config: ModelConfig, part: Shard) -> dict[str, int]:
    """Of the MLPs and of each expert, where the model has such."""
    found = {}
    if config.experts is None or not all(config.experts.layers):
        found["mlp_columns"] = part.mlp_columns.stop - part.mlp_columns.start
    if config.experts is not None:
        found["expert_columns"] = part.expert_columns.stop - part.expert_columns.start
    return found


def report(question: Question, *, compare_pipeline: bool = False) -> dict[str, Any]:
    """Everything that `tokenweave plan` knows, as JSON data. Raises ValueError if the model cannot be split so."""
    costs, config, size = question.costs, question.config, question.tensor_parallel_size
    kv_tokens = config.max_position_embeddings if question.kv_tokens is None else question.kv_tokens
    memory = inference_memory(
        config, size, element=costs.bytes, step_tokens=max(question.tokens), kv_tokens=kv_tokens
    )  # fmt: skip
    steps = [step_row(costs, tokens, question.context) for tokens in question.tokens]
    found: dict[str, Any] = {
        "model": config.architecture,
        "hardware": question.hardware.name,
        "hardware_source": question.hardware.source,
        "tensor_parallel_size": size,
        "dtype": question.dtype,
        "steps": steps,
        "balance": balance_rows(costs),
        "inference_memory_bytes": asdict(memory) | {"total": memory.total, "of": int(question.hardware.memory_bytes)},
        "kv_tokens": kv_tokens,
        "kv_bytes_per_token": kv_bytes_per_token(config, size, costs.bytes),
        "training_memory_bytes": [
            asdict(training) | {"total": training.total, "float32_gradients": wide}
            for wide in (False, True)
            for training in [training_memory(config, size, float32_gradients=wide)]
        ],
    }
    if compare_pipeline:
        found["pipeline"] = [_pipeline_row(costs, row, question.context) for row in steps]
    found["notes"] = _notes(question, costs, found)
    return found


def _waves(costs: AnalyticalCosts, shape: StepShape, cut: int) -> list[dict[str, Any]]:
    """Per matmul, for the whole step and for each lane: the tile that is fastest there, and its waves."""

    def filled(matmul: Matmul, tokens: int) -> dict[str, Any]:
        found = costs.waves(matmul, tokens)
        return {"tile": f"{found.tile.rows}x{found.tile.columns}", "tiles": found.tiles, "waves": found.waves}

    lanes = [cut, shape.tokens - cut] if cut else []
    return [
        {"matmul": m.name, "whole": filled(m, shape.tokens), "lanes": [filled(m, tokens) for tokens in lanes]}
        for stage in LAYER
        for m in costs.matmuls[stage]
    ]


def _pipeline_row(costs: AnalyticalCosts, step: dict[str, Any], context: int) -> dict[str, Any]:
    tokens = step["tokens"]
    pipeline = predict_pipeline(costs, tokens, context)
    decode: Choice = choose(costs, StepShape.decode(1, context + tokens + 1))
    return {
        "tokens": tokens,
        "micro_batches": pipeline.chunks,
        "bubble": pipeline.bubble,
        "first_token_ms": {"tensor": step["predicted_ms"][step["mode"]], "pipeline": pipeline.first_token * 1e3},
        "per_token_ms": {"tensor": decode.prediction.seconds * 1e3, "pipeline": pipeline.token_latency * 1e3},
    }


def _notes(question: Question, costs: AnalyticalCosts, found: dict[str, Any]) -> list[str]:
    """Where splitting so does not pay, or does not fit."""
    config, size, notes = question.config, question.tensor_parallel_size, []
    kv = config.num_key_value_heads
    if size > kv:
        heads = "a single KV head" if kv == 1 else f"{kv} KV heads"
        notes.append(
            f"{heads} on {size} ranks: every rank keeps one whole, so beyond {kv} rank{'s' * (kv > 1)} the KV cache of "
            f"a rank does not shrink"
        )
    counts = {"query_heads": config.num_attention_heads, "mlp_columns": config.intermediate_size}
    if config.experts:
        counts["expert_columns"] = config.experts.intermediate_size
    for name, count in counts.items():
        heaviest = max(row.get(name, 0) for row in found["balance"])
        if heaviest * size > 1.05 * count:
            notes.append(
                f"the heaviest rank holds {heaviest} of {count} {name.replace('_', ' ')}: {size} ranks are at most "
                f"{count / heaviest:.2f} times as fast there"
            )
    alone = AnalyticalCosts(config, question.hardware, 1, question.dtype)
    for step in found["steps"] if size > 1 else []:
        one = choose(alone, StepShape.prefill(step["tokens"], question.context)).prediction.seconds * 1e3
        split = step["predicted_ms"][step["mode"]]
        if split >= one:
            notes.append(
                f"a step of {step['tokens']} tokens takes {split:.3g} ms on {size} ranks and {one:.3g} ms on one: "
                f"splitting does not pay"
            )
    memory = found["inference_memory_bytes"]
    if memory["total"] > memory["of"] > 0:
        notes.append(
            f"inference needs {memory['total'] / 1e9:.3g} GB a rank and {question.hardware.name} has "
            f"{memory['of'] / 1e9:.3g}: take more ranks or fewer tokens"
        )
    return notes
