"""The same GPUs as pipeline stages: what a step costs when layers are dealt out instead of heads and columns."""

from dataclasses import dataclass, replace

from tokenweave.plan.analytical import AnalyticalCosts
from tokenweave.plan.costs import LAYER
from tokenweave.plan.shape import Load, StepShape

MOST_CHUNKS = 64
LEAST_CHUNK = 128  # tokens: a smaller micro-batch does not fill one tile


@dataclass(frozen=True)
class PipelinePrediction:
    """A prompt's prefill in `chunks` micro-batches, and one token of decode. Seconds.

    bubble: the share of the prefill in which a GPU waits, on the mean over GPUs. token_latency: between two tokens of
    one request; it passes all stages one after the other, so more of them do not shorten it.
    """

    chunks: int
    first_token: float
    bubble: float
    token_latency: float


def predict_pipeline(costs: AnalyticalCosts, tokens: int, context: int) -> PipelinePrediction:
    """costs.size GPUs as stages: prefill of one prompt after `context` cached tokens in the number of micro-batches
    that is fastest, then decode of one request.

    Raises ValueError if there are more GPUs than layers.
    """
    stages, layers = costs.size, costs.config.num_hidden_layers
    if stages > layers:
        raise ValueError(f"{stages} pipeline stages are more than the model's {layers} layers")
    whole = replace(costs, size=1)
    counts = [chunks for chunks in (1 << i for i in range(MOST_CHUNKS.bit_length())) if tokens >= chunks * LEAST_CHUNK]
    runs = {chunks: _prefill(whole, stages, tokens, context, chunks) for chunks in counts or [1]}
    best = min(runs, key=lambda chunks: runs[chunks][0])
    decode = StepShape.decode(1, context + tokens + 1).load()
    depth = [layers * (stage + 1) // stages - layers * stage // stages for stage in range(stages)]
    token = sum(_stage(whole, decode, count) for count in depth) + whole.compute("embed", decode) + whole.head(1)
    return PipelinePrediction(best, runs[best][0], runs[best][1], token + (stages - 1) * _send(costs, 1))


def _prefill(whole: AnalyticalCosts, stages: int, tokens: int, context: int, chunks: int) -> tuple[float, float]:
    """Seconds until the last micro-batch leaves the last stage, and the share of them in which a GPU waits.

    A micro-batch's stage starts when the stage before has sent it and the one ahead of it has left.
    """
    layers = whole.config.num_hidden_layers
    depth = [layers * (stage + 1) // stages - layers * stage // stages for stage in range(stages)]
    bounds = [tokens * i // chunks for i in range(chunks + 1)]
    free, busy = [0.0] * stages, 0.0
    for start, stop in zip(bounds, bounds[1:], strict=False):
        load = StepShape.prefill(stop - start, context + start).load()
        arrived = 0.0
        for stage in range(stages):
            work = _stage(whole, load, depth[stage])
            work += whole.compute("embed", load) if stage == 0 else 0.0
            work += whole.head(load.rows) if stage == stages - 1 and stop == tokens else 0.0
            free[stage] = max(free[stage], arrived) + work
            arrived = free[stage] + _send(whole, load.tokens)
            busy += work
    return free[-1], 1 - busy / (stages * free[-1]) if free[-1] else 0.0


def _stage(whole: AnalyticalCosts, load: Load, layers: int) -> float:
    return layers * (sum(whole.compute(stage, load) for stage in LAYER) + 2 * whole.norm(load.tokens))


def _send(costs: AnalyticalCosts, tokens: int) -> float:
    """Hidden states to the next stage, point to point."""
    hardware = costs.hardware
    message = tokens * costs.config.hidden_size * costs.bytes
    return hardware.link_latency + message / (hardware.link_bandwidth * hardware.link_efficiency)
