"""tokenweave trace: what a step does when, lane by lane and rank by rank, as a Chrome trace and as a picture."""

import argparse
from contextlib import closing
from dataclasses import asdict
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import torch

from tokenweave.bench import output
from tokenweave.bench.namespaces import NetworkRanks
from tokenweave.cli.trace_files import picture, table, write_chrome
from tokenweave.comm import Group, launch
from tokenweave.config.foreign import read_config
from tokenweave.engine.config import EngineConfig
from tokenweave.engine.llm import resolved
from tokenweave.execute.measure import BLOCK_SIZE, TrialRunner
from tokenweave.execute.timeline import Event, RecordedStep, record_trial
from tokenweave.models.loading import load_model
from tokenweave.models.resolve import resolve
from tokenweave.plan import MODES, StepPlan, plan_step
from tokenweave.plan.trial import Trial

PICTURE = "trace.png"  # without --plot
ROUNDS = 7  # after one that warms up; the median is shown
DECODES = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="directory, .gguf file or hub id; default: the demo model")
    parser.add_argument("--tp", type=int, default=2, help="tensor parallel size: ranks (default: 2)")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of one prompt (default: 512)")
    parser.add_argument("--decode", type=int, metavar="CONTEXT",
                        help=f"instead, decode {DECODES} requests that have so many tokens")  # fmt: skip
    parser.add_argument("--mode", nargs="+", choices=MODES, default=["serial", "fused", "weave"],
                        help="one below another (default: serial fused weave)")  # fmt: skip
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--collective", choices=("auto", "shared_memory", "distributed"), default="auto")
    parser.add_argument("--link", type=float, metavar="MBIT", help="over a link of so many Mbit/s: see `bench network`")
    parser.add_argument("--trace", metavar="FILE", default="trace.json", help="for ui.perfetto.dev (trace.json)")
    parser.add_argument("--plot", metavar="FILE", help=f"picture, .png or .svg ({PICTURE}, where there is matplotlib)")


def run(args: argparse.Namespace) -> int:
    plot = args.plot or (PICTURE if find_spec("matplotlib") else None)
    if plot is not None:
        output.check_plot(plot)
    config = EngineConfig(tensor_parallel_size=args.tp, dtype=args.dtype, collective=args.collective, device="cpu")
    directory = resolve(args.model, args.dtype)
    model = read_config(directory)
    config = resolved(config, model)
    counts: tuple[int, ...] = (args.prefill,)
    contexts = counts
    if args.decode is not None:
        counts, contexts = (1,) * DECODES, (args.decode,) * DECODES
    if min(contexts) < 1 or max(contexts) > model.max_position_embeddings:
        longest = model.max_position_embeddings
        raise ValueError(f"tokens must be in [1, {longest}], the model's context, got {max(contexts)}")
    plans = tuple(plan_step(mode, sum(counts)) for mode in args.mode)
    if "weave" in args.mode and "fused" not in args.mode:
        plans += (StepPlan("fused"),)  # what the woven step is compared with
    trial = Trial(counts=counts, contexts=contexts, plans=plans, rounds=ROUNDS + 1)
    if args.link is None:
        ranks = launch(record, args.tp, config.collective, args=(directory, config.dtype, trial))
    else:
        ranks = over_link(args, directory, config.dtype, trial)
    recorded = typical(ranks)
    steps, fused = recorded[: len(args.mode)], next((s for s in recorded if s[0].plan.mode == "fused"), None)
    write_chrome(args.trace, steps)
    if plot is not None:
        picture(plot, steps, fused, layers=model.num_hidden_layers)
    print(table(steps, fused))
    drawn = f"{plot} is the picture" if plot is not None else "for a picture too: pip install matplotlib"
    print(f"the median of {ROUNDS} steps; {args.trace} opens at ui.perfetto.dev; {drawn}")
    return 0


def record(group: Group, directory: Path, dtype_name: str, trial: Trial) -> list[list[RecordedStep]]:
    """One rank: its recorded steps by round and plan."""
    dtype, tokens = getattr(torch, dtype_name), sum(trial.counts)
    model = load_model(directory, rank=group.rank, size=group.size, dtype=dtype, device=str(group.device))
    with group.open_collective(model.config.hidden_size, tokens, dtype, 2) as collective:
        with closing(TrialRunner(model, collective, max_tokens=tokens, cache_tokens=cache_tokens(trial))) as runner:
            return record_trial(runner.executor, runner.cache, trial)


def over_link(args: argparse.Namespace, directory: Path, dtype: str, trial: Trial) -> list[list[list[RecordedStep]]]:
    """The same on two ranks with a slow link between them."""
    if args.tp != 2:
        raise ValueError(f"--link is between 2 ranks, got --tp {args.tp}")
    if not 0 < args.link < inf:
        raise ValueError(f"--link must be more than 0 Mbit/s, got {args.link:g}")
    settings = {"directory": str(directory), "dtype": dtype, "max_tokens": sum(trial.counts),
                "cache_tokens": cache_tokens(trial)}  # fmt: skip
    with NetworkRanks("tokenweave.bench.network_rank", settings) as ranks:
        ranks.ask("go")
        ranks.set_rate(args.link * 1e6)
        answers = ranks.ask({"record": asdict(trial)})
    return [[[_step(step) for step in round_] for round_ in answer] for answer in answers]


def _step(words: dict[str, Any]) -> RecordedStep:
    events = [Event(**event) for event in words["events"]]
    return RecordedStep(**words | {"plan": StepPlan(**words["plan"]), "events": events})


def cache_tokens(trial: Trial) -> int:
    """Room for all requests, each of which has blocks of its own."""
    return sum(-(-context // BLOCK_SIZE) * BLOCK_SIZE for context in trial.contexts)


def typical(ranks: list[list[list[RecordedStep]]]) -> list[list[RecordedStep]]:
    """Of each plan the round of median length, by rank: [plan][rank]. ranks: by rank, round and plan."""
    warm = [rounds[1:] for rounds in ranks]
    chosen = []
    for plan in range(len(warm[0][0])):
        order = sorted(range(len(warm[0])), key=lambda i: max(rounds[i][plan].seconds for rounds in warm))
        chosen.append([rounds[order[len(order) // 2]][plan] for rounds in warm])
    return chosen
