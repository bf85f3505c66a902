"""tokenweave bench network: prefill on two ranks with a slow link between them, mode by mode and rate by rate.

Each rank has a core and a network namespace of its own (see `namespaces`); needs root, and iproute2.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from math import inf
from typing import Any

import numpy as np
from tqdm import tqdm

from tokenweave.bench import output
from tokenweave.bench.namespaces import NetworkRanks
from tokenweave.bench.paired import LEAST_ROUNDS, upper_bound
from tokenweave.config import ModelConfig
from tokenweave.config.foreign import read_config
from tokenweave.models.resolve import resolve
from tokenweave.plan import Planner, StepPlan
from tokenweave.plan.hardware import cpu
from tokenweave.plan.table import TunedTable, TuneKey
from tokenweave.plan.trial import RankTimes, Trial, TrialResult
from tokenweave.plan.tuning import HEAD_ROWS, Tuner

RATES = (200, 500, 1000, 1500, 2000, 5000, 10000)  # Mbit/s
LEAST_CACHE = 16 * max(HEAD_ROWS)  # tokens: tuning has so many requests at once, of one block each
PLAIN = (StepPlan("nocomm"), StepPlan("serial"), StepPlan("fused"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="directory, .gguf file or hub id; default: the demo model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="(default: bfloat16)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024], help="prompt lengths (default: 1024)")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="Mbit/s (default: 200 to 10000)")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds; medians are shown (default: 15)")
    output.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if min(args.tokens) < 2 or not all(0 < rate < inf for rate in args.rates) or args.rounds < LEAST_ROUNDS:
        raise ValueError(f"--tokens must be at least 2, --rates more than 0, --rounds at least {LEAST_ROUNDS}")
    if args.plot:
        output.check_plot(args.plot)
    rows = measure(args.model, args.dtype, args.tokens, args.rates, args.rounds)
    print(output.table(list(rows[0]), [[_shown(value) for value in row.values()] for row in rows]))
    print(
        f"2 ranks, a core and a network namespace each, {args.dtype}; prefill in ms, medians of {args.rounds} "
        "interleaved rounds, slowest rank.\ncompute: without communication. communication: of fused, without waiting "
        "for the slower rank. bound: the larger of the two.\nweave, auto: tuned on this link. ÷: of the same round; "
        "auto's to the better of serial and fused, with its upper 95 % bound"
    )
    if args.json:
        output.write_json(args.json, rows)
    if args.plot:
        plot(args.plot, rows)
    return 0


def measure(
    model: str | None, dtype: str, tokens: Sequence[int], rates: Sequence[float], rounds: int
) -> list[dict[str, Any]]:
    """A row of figures for each rate and prompt length."""
    directory = resolve(model, dtype)
    config = read_config(directory)
    if config.max_position_embeddings < max(tokens):
        raise ValueError(f"the model's context is {config.max_position_embeddings} tokens, got {max(tokens)}")
    settings = {
        "directory": str(directory), "dtype": dtype, "max_tokens": max(tokens),
        "cache_tokens": max(2 * max(tokens), LEAST_CACHE),
    }  # fmt: skip
    rows = []
    with NetworkRanks("tokenweave.bench.network_rank", settings) as ranks:
        ranks.ask("go")  # loads the model
        with tqdm(total=len(rates) * len(tokens), unit="point", disable=None, leave=False) as bar:
            for rate in rates:
                ranks.set_rate(rate * 1e6)
                trials = _Trials(ranks)
                bar.set_description(f"{rate:g} Mbit/s, tuning")
                table = _tuned(trials, config, tokens)
                for count in tokens:
                    bar.set_description(f"{rate:g} Mbit/s, {count} tokens")
                    rows.append({"Mbit/s": rate, "tokens": count} | _row(trials, table, count, rounds))
                    bar.update()
    return rows


class _Trials:
    """Trials on ranks that are reached by JSON lines."""

    def __init__(self, ranks: NetworkRanks) -> None:
        self._ranks = ranks
        self.last: list[RankTimes] = []

    def key(self) -> TuneKey:
        """Of the link as it is now."""
        words = self._ranks.ask({"key": True})[0]
        return TuneKey(**words | {"model": tuple(words["model"])})

    def run(self, trial: Trial) -> TrialResult:
        answers = self._ranks.ask({"trial": asdict(trial)})
        self.last = [RankTimes(**{name: np.array(v) for name, v in answer.items()}) for answer in answers]
        return TrialResult(self.last)


def _tuned(trials: _Trials, config: ModelConfig, tokens: Sequence[int]) -> TunedTable:
    """What `tokenweave tune` would find on this link."""
    context = min(config.max_position_embeddings, 2 * max(tokens))
    tuner = Tuner(
        trials, tokens, layers=config.num_hidden_layers, context=context, hardware=cpu(1, shared_memory=False)
    )  # fmt: skip
    return tuner.tune(trials.key())


def _row(trials: _Trials, table: TunedTable, tokens: int, rounds: int) -> dict[str, Any]:
    weave, auto = (Planner(mode, table).plan([tokens], [tokens]) for mode in ("weave", "auto"))
    plans = list(dict.fromkeys([*PLAIN, weave, auto]))  # an auto that is one of the others is that one
    trial = Trial(counts=(tokens,), contexts=(tokens,), plans=tuple(plans), rounds=rounds + 1)
    steps = trials.run(trial).steps[:, 1:]  # of the slowest rank; the first round warms up
    seconds = dict(zip(plans, steps, strict=True))
    communication = _communication(trials.last, plans.index(StepPlan("fused")))
    nocomm, serial, fused = (seconds[plan] for plan in PLAIN)
    best = min(serial, fused, key=np.median)
    compute = float(np.median(nocomm))
    return {
        "compute": 1e3 * compute,
        "communication": 1e3 * communication,
        "bound": 1e3 * max(compute, communication),
        "serial": 1e3 * float(np.median(serial)),
        "fused": 1e3 * float(np.median(fused)),
        "weave": 1e3 * float(np.median(seconds[weave])),
        "cut": weave.cut,
        "auto": 1e3 * float(np.median(seconds[auto])),
        "plan": f"{auto.mode} {auto.cut}" if auto.mode == "weave" else auto.mode,
        "serial ÷ weave": float(np.median(serial / seconds[weave])),
        "fused ÷ weave": float(np.median(fused / seconds[weave])),
        "auto ÷ best": float(np.median(seconds[auto] / best)),
        "95 %": upper_bound(seconds[auto] / best),
    }


def _communication(ranks: Sequence[RankTimes], plan: int) -> float:
    """Median seconds of all operations of a step; the last to come to one waits for nobody."""
    operations = np.min([rank.reductions[plan, 1:] for rank in ranks], axis=0)
    return float(np.median(operations.sum(axis=1)))


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if value < 20 else f"{value:.0f}"
    return str(value)


def plot(path: str, rows: Sequence[dict[str, Any]]) -> None:
    """Time against link rate, a panel for each prompt length."""
    counts = sorted({row["tokens"] for row in rows})
    fig, axes = output.figure(width=6.5 * len(counts), height=4.5)
    axes.remove()
    for index, count in enumerate(counts):
        part = fig.add_subplot(1, len(counts), index + 1)
        chosen = sorted((row for row in rows if row["tokens"] == count), key=lambda row: row["Mbit/s"])
        rates = [row["Mbit/s"] for row in chosen]
        for mode, style in (("serial", "s-"), ("fused", "o-"), ("weave", "D-"), ("auto", "k:")):
            part.plot(rates, [row[mode] for row in chosen], style, label=mode)
        bound = [row["bound"] for row in chosen]
        part.fill_between(rates, bound, alpha=0.15, color="gray", label="max(compute, communication)")
        part.set(xscale="log", yscale="log", xlabel="link, Mbit/s", ylabel="prefill, ms", title=f"{count} tokens")
        part.set_xticks(rates, [f"{rate:g}" for rate in rates])
        low, high = part.get_ylim()
        times = [digit * 10**power for power in range(7) for digit in (1, 2, 5)]
        part.set_yticks(shown := [ms for ms in times if low <= ms <= high], [f"{ms}" for ms in shown])
        part.minorticks_off()
        part.legend()
    fig.savefig(path)
