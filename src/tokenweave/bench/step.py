"""tokenweave bench step: one step of so many tokens, modes taking turns within the same ranks.

Of two modes what counts is the ratio within a round: what else the machine does falls on both. A claim of "never
slower" is the upper 95 % bound of that ratio.
"""

import argparse
import time
from typing import Any

import numpy as np
from tqdm import tqdm

from tokenweave.bench import output
from tokenweave.bench.paired import LEAST_ROUNDS, upper_bound
from tokenweave.engine.config import COLLECTIVES, DTYPES, EngineConfig
from tokenweave.engine.trials import TrialRanks
from tokenweave.execute.measure import BLOCK_SIZE
from tokenweave.plan import MODES, Planner
from tokenweave.plan.shape import StepShape
from tokenweave.plan.trial import Trial

BATCH = 0.5  # seconds of rounds asked of the ranks at a time, so that the bar moves
PLANNED = 200  # times that planning is timed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="directory, .gguf file or hub id; default: the demo model")
    parser.add_argument("--tp", type=int, default=2, help="tensor parallel size (default: 2)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="(default: the checkpoint's)")
    parser.add_argument("--collective", choices=COLLECTIVES, default="auto", help="(default: auto)")
    parser.add_argument(
        "--mode", nargs="+", choices=("auto", *MODES), default=["auto", "serial", "fused"],
        help="the first is compared with each of the others (default: auto serial fused)",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1, 16, 128, 512, 2048],
        help="new tokens of the step (default: 1 16 128 512 2048)",
    )  # fmt: skip
    parser.add_argument("--decode", type=int, metavar="CONTEXT", help="each token is of a request with so many keys")
    parser.add_argument("--rounds", type=int, default=31, help="interleaved rounds; quick steps get more (default: 31)")
    output.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if min(args.tokens) < 1 or args.rounds < LEAST_ROUNDS or (args.decode is not None and args.decode < 1):
        raise ValueError(f"--tokens and --decode must be at least 1, --rounds at least {LEAST_ROUNDS}")
    if args.plot:
        output.check_plot(args.plot)
    config = EngineConfig(tensor_parallel_size=args.tp, dtype=args.dtype, collective=args.collective)
    most = max(args.tokens)
    keys = most * (args.decode + BLOCK_SIZE) if args.decode else 0
    with TrialRanks(args.model, config, max_tokens=most, cache_tokens=keys) as ranks:
        planners = {
            mode: Planner.open(mode, ranks.model_config, ranks.key, ranks.hardware) for mode in dict.fromkeys(args.mode)
        }
        rows = [row for tokens in args.tokens for row in _rows(ranks, planners, tokens, args)]
        key = ranks.key
    print(output.table(list(rows[0]), [[_shown(value) for value in row.values()] for row in rows]))
    first = args.mode[0]
    print(
        f"{key.tensor_parallel_size} ranks, {key.threads} threads each, {key.dtype}, {key.collective}; slowest rank, "
        f"from a barrier to the last logits; medians, {first} with its planning\n"
        f"ratio: {first} to the mode of the row, of the same round; 95 %: its upper bound\n"
        f"plan: {planners[first].source}"
    )
    if args.json:
        output.write_json(args.json, rows)
    if args.plot:
        _plot(args.plot, rows)
    return 0


def _rows(
    ranks: TrialRanks, planners: dict[str, Planner], tokens: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    shape = StepShape.decode(tokens, args.decode) if args.decode else StepShape.prompts(tokens, ranks.context)
    planning = {mode: _planning(planner, shape) for mode, planner in planners.items()}
    plans = {mode: planner.plan(shape.counts, shape.contexts) for mode, planner in planners.items()}
    different = tuple(dict.fromkeys(plans.values()))  # modes that make the same of this step are run as one
    trial = Trial.of(shape, different, rounds=1)
    once = float(ranks.run(trial).steps.sum())  # the first round warms up and tells how many fit at a time
    rounds = max(args.rounds, min(10 * args.rounds, int(10 / once)))
    # in a multiple of as many rounds as there are plans, every plan runs behind every other
    batch = len(different) * max(1, int(BATCH / once / len(different)))
    parts = []
    with tqdm(total=rounds, desc=f"{tokens} tokens", unit="round", disable=None, leave=False) as bar:
        for start in range(0, rounds, batch):
            count = min(batch, rounds - start)
            parts.append(ranks.run(Trial.of(shape, trial.plans, rounds=count)).steps)
            bar.update(count)
    steps = np.concatenate(parts, axis=1)
    seconds = {mode: steps[different.index(plan)] + planning[mode] for mode, plan in plans.items()}
    first = next(iter(plans))
    return [
        {
            "tokens": tokens,
            "mode": mode,
            "plan": f"{plan.mode} {plan.cut}" if plan.mode == "weave" else plan.mode,
            "ms": 1e3 * float(np.median(seconds[mode])),
            "ratio": float(np.median(seconds[first] / seconds[mode])),
            "95 %": upper_bound(seconds[first] / seconds[mode]),
            "rounds": rounds,
        }
        for mode, plan in plans.items()
    ]  # fmt: skip


def _planning(planner: Planner, shape: StepShape) -> float:
    """Median seconds of finding the plan of such a step."""
    taken = []
    for _ in range(PLANNED):
        start = time.perf_counter()
        planner.plan(shape.counts, shape.contexts)
        taken.append(time.perf_counter() - start)
    return float(np.median(taken))


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if value < 2 else f"{value:.2f}" if value < 100 else f"{value:.1f}"
    return str(value)


def _plot(path: str, rows: list[dict[str, Any]]) -> None:
    """The first mode's time relative to each other's, with the bound above it."""
    fig, axes = output.figure()
    for mode in list(dict.fromkeys(row["mode"] for row in rows))[1:]:
        chosen = [row for row in rows if row["mode"] == mode]
        tokens, ratios = [row["tokens"] for row in chosen], [row["ratio"] for row in chosen]
        bound = [max(0.0, row["95 %"] - row["ratio"]) for row in chosen]
        axes.errorbar(tokens, ratios, yerr=[[0.0] * len(bound), bound], marker="o", capsize=3, label=f"÷ {mode}")
    axes.axhline(1.0, color="gray", lw=0.8)
    axes.set(xscale="log", xlabel="tokens", ylabel=f"{rows[0]['mode']} ÷ mode, with upper 95 % bound")
    axes.legend()
    fig.savefig(path)
