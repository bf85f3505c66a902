"""The simulator against published figures: `python -m tokenweave.plan.published` fits, predicts and compares.

The inputs are latencies without communication and times of collectives; the targets are woven latencies. The one
constant, contention, is fitted on Llama-3.3-70B at tp 8; everything else is unseen.
"""

import csv
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from tokenweave.plan.costs import MeasuredCosts
from tokenweave.plan.curves import Curve
from tokenweave.plan.fit import fit_contention
from tokenweave.plan.hardware import hardware
from tokenweave.plan.shape import StepShape
from tokenweave.plan.simulate import simulate
from tokenweave.plan.step import StepPlan

SIZES = (2048, 4096, 8192, 16384, 32768, 65536)
SPACING = 1024  # cuts are this far apart: no latency is published for fewer tokens
BUDGETS = (2, 4, 8, 16, 32)
COLLECTIVE_HIDDEN, COLLECTIVE_TP = 8192, 8  # of the published collectives


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """Dimensions, from the model's config.json."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int  # of all experts that a token uses
    head_dim: int = 128


LLAMA = PublishedModel(
    name="Llama-3.3-70B-Instruct", layers=80, hidden=8192, heads=64, kv_heads=8, intermediate=28672
)  # fmt: skip
QWEN = PublishedModel(name="Qwen2.5-72B-Instruct", layers=80, hidden=8192, heads=64, kv_heads=8, intermediate=29568)
MIXTRAL = PublishedModel(
    name="Mixtral-8x22B-Instruct-v0.1", layers=56, hidden=6144, heads=48, kv_heads=8, intermediate=2 * 16384
)  # fmt: skip


@cache
def figures() -> dict[tuple[str, int, str], dict[int, float]]:
    """{(model or "-", tp, system): {tokens: seconds}}."""
    text = resources.files("tokenweave.plan").joinpath("data/published_h100.csv").read_text(encoding="utf-8")
    found: dict[tuple[str, int, str], dict[int, float]] = {}
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        seconds = float(row["value"]) / (1e3 if row["measure"] == "prefill_ms" else 1e6)
        found.setdefault((row["model"], int(row["tp"]), row["system"]), {})[int(row["tokens"])] = seconds
    return found


@cache
def published_costs(model: PublishedModel, tp: int) -> MeasuredCosts:
    """Costs from the published latencies without communication and the published collectives, no contention yet.

    The latency is taken apart. The RMSNorm of every row is published and leaves it: woven, it is inside the fused
    operation. Attention's share grows with the square of the prompt at the device's attention rate, so that the second
    lane, whose queries see the first lane's keys, gets its greater part of it. The rest goes to the two stages of a
    layer by their multiplications. Collectives are scaled to this hidden size and tensor parallel size by the bytes
    that cross a link, and lanes' tokens by the same, so that the fixed part of a collective stays.
    """
    device = hardware("h100")
    norm, all_reduce, one_rank = (
        _collective(name, model, 1.0)
        for name in ("add_rms_norm_all_tokens", "multimem_all_reduce", "add_rms_norm_one_rank_share")
    )
    traffic = (1 + 1 / tp) / (1 + 1 / COLLECTIVE_TP)
    scattered, gathered = (_collective(f"multimem_{name}", model, 1.0) for name in ("reduce_scatter", "all_gather"))
    pair_seconds = 4 * model.heads * model.head_dim / tp / (device.peak_flops * device.attention_efficiency)
    reductions = 1 + 2 * model.layers
    attention = model.heads * 2 + model.kv_heads * 2  # multiplications a token, in units of hidden * head_dim
    mlp = 3 * model.intermediate / model.head_dim
    stages: dict[str, dict[int, float]] = {"embed": {1: 0.0}, "attention": {}, "mlp": {}}
    for tokens, latency in figures()[model.name, tp, "nocomm"].items():
        pairs = StepShape.prefill(tokens).load().pairs
        layer = (latency - reductions * norm(tokens)) / model.layers - pairs * pair_seconds
        stages["attention"][tokens] = layer * attention / (attention + mlp)
        stages["mlp"][tokens] = layer * mlp / (attention + mlp)
    return MeasuredCosts(
        layers=model.layers,
        stages={stage: Curve.of(points) for stage, points in stages.items()},
        norm_curve=norm,
        all_reduce_curve=_collective("multimem_all_reduce", model, traffic),
        reordered_curve=Curve.of({n: scattered(n) + gathered(n) + one_rank(n) for n in scattered.sizes}),
        fused_curves={budget: _collective(f"fused_ctas_{budget}", model, traffic) for budget in BUDGETS},
        pair_seconds=pair_seconds,
        grain=SPACING,
    )


def predict(costs: MeasuredCosts, tokens: int) -> float:
    """The woven latency: the best of all budgets and of the cuts near the middle, where the published system cuts."""
    shape = StepShape.prefill(tokens)
    cuts = [cut for cut in range(SPACING, tokens, SPACING) if 3 * tokens <= 8 * cut <= 5 * tokens]
    plans = (StepPlan("weave", cut, budget) for cut in cuts for budget in costs.budgets)
    return min(simulate(costs, shape, plan).seconds for plan in plans)


def predict_all(model: PublishedModel, tp: int, contention: float) -> list[float]:
    costs = replace(published_costs(model, tp), contention=contention)
    return [predict(costs, tokens) for tokens in SIZES]


def fit() -> float:
    """The contention that Llama-3.3-70B at tp 8 shows."""
    woven = figures()[LLAMA.name, 8, "tokenweave"]
    return fit_contention(lambda contention: predict_all(LLAMA, 8, contention), [woven[n] for n in SIZES])


def errors(model: PublishedModel, tp: int, contention: float) -> tuple[list[float], list[float]]:
    """Relative errors by SIZES: of the simulator, and of the predictor "a woven step takes as long as one without
    communication"."""
    woven, nocomm = (figures()[model.name, tp, system] for system in ("tokenweave", "nocomm"))
    simulated = predict_all(model, tp, contention)
    return (
        [p / woven[n] - 1 for n, p in zip(SIZES, simulated, strict=True)],
        [nocomm[n] / woven[n] - 1 for n in SIZES],
    )


def _collective(name: str, model: PublishedModel, traffic: float) -> Curve:
    """A published curve at this model's hidden size; the part that grows with the message scaled by `traffic`."""
    points = figures()["-", COLLECTIVE_TP, name]
    scale = traffic * model.hidden / COLLECTIVE_HIDDEN
    curve = Curve.of(points)
    return Curve(curve.sizes, tuple(curve(n * scale) for n in curve.sizes))


def main() -> None:
    contention = fit()
    print(f"contention fitted on {LLAMA.name} tp 8: {contention:.4f}")
    for model, tp in ((LLAMA, 8), (QWEN, 8), (LLAMA, 4), (QWEN, 4)):
        ours, theirs = errors(model, tp, contention)
        mean, other = (sum(map(abs, e)) / len(e) for e in (ours, theirs))
        row = " ".join(f"{e:+.1%}" for e in ours)
        print(f"{model.name:<23} tp {tp}: mean {mean:.2%} worst {max(map(abs, ours)):.2%} (nocomm {other:.2%}): {row}")


if __name__ == "__main__":
    main()
