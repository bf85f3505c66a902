"""tokenweave tune: measure this machine for a model, so that every step is planned from what it really costs here."""

import argparse
import sys
import time
from typing import Any

from tqdm import tqdm

from tokenweave.bench import emulated, output
from tokenweave.bench.dimensions import DIMENSIONS
from tokenweave.cli import options
from tokenweave.engine.config import COLLECTIVES, DTYPES, EngineConfig
from tokenweave.engine.device import device_for
from tokenweave.engine.trials import TrialRanks
from tokenweave.plan import Planner, StepPlan
from tokenweave.plan.choose import HIDES_NOTHING
from tokenweave.plan.gpu_tuning import GpuTuner
from tokenweave.plan.shape import StepShape
from tokenweave.plan.simulate import simulate
from tokenweave.plan.table import TunedTable, cache_directory, check_writable
from tokenweave.plan.tuning import Regret, Tuner

TOKENS = "1,16,128,512,2048"
# A cut that is taken over in proportion costs up to a tenth: on a GPU what is run is what is chosen.
GPU_TOKENS = "1,16,64,128,256,512,768,1024,1536,2048,3072,4096,6144,8192"
MOST_UNREST = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help=emulated.MODEL_HELP)
    parser.add_argument("--tp", type=int, default=2, help="tensor parallel size: ranks (default: 2)")
    parser.add_argument(
        "--tokens",
        help=f"tokens of the steps, with commas (default: {TOKENS}; on GPUs {GPU_TOKENS.replace(',', ', ')})",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of weights and activations (default: auto)")
    parser.add_argument("--collective", choices=COLLECTIVES, default="auto", help="(default: auto)")
    emulated.add_arguments(parser)
    parser.add_argument("--exhaustive", action="store_true", help="also run a scan, and tell what it would have gained")
    parser.add_argument("--json", metavar="FILE", help="write every figure to this file")


def run(args: argparse.Namespace) -> int:
    began = time.perf_counter()
    sizes = options.numbers("--tokens", args.tokens or (GPU_TOKENS if _on_gpus(args) else TOKENS))
    if min(sizes) < 1:
        raise ValueError(f"--tokens takes numbers of at least 1, got {args.tokens}")
    model, chosen = emulated.chosen_model(args)
    config = EngineConfig(
        **dict(tensor_parallel_size=args.tp, dtype=args.dtype, collective=args.collective) | chosen
    )  # fmt: skip
    with TrialRanks(model, config, max_tokens=max(sizes)) as ranks:
        check_writable(cache_directory())
        table, tuner = _tuned(ranks, sizes)
        path = table.save(cache_directory())
        took = time.perf_counter() - began
        regrets = _regrets(tuner, table) if args.exhaustive else []
    print(_text(table, tuner))
    if regrets:
        print(_regret_text(regrets))
    if (unrest := max(tuner.unrest.values())) > MOST_UNREST:
        print(f"the machine was busy: like steps differed by {unrest:.0%}; tune again when it is not")
    print(f"measured in {took:.0f} s; kept in {path}")
    if args.json:
        output.write_json(args.json, _rows(table, tuner), regret=_regret_rows(regrets), table=table.to_json())
    return 0


def _on_gpus(args: argparse.Namespace) -> bool:
    return bool(args.emulate_tp) or args.model in DIMENSIONS or device_for("auto", args.tp, args.collective) == "cuda"


def _tuned(ranks: TrialRanks, sizes: tuple[int, ...]) -> tuple[TunedTable, Tuner]:
    bar = tqdm(unit="measurement", disable=not sys.stderr.isatty(), leave=False)

    def report(what: str) -> None:
        bar.set_description(what)
        bar.update()

    with bar:
        layers = ranks.model_config.num_hidden_layers
        tuner = (GpuTuner if ranks.key.threads == 0 else Tuner)(
            ranks, sizes, layers=layers, context=ranks.context, hardware=ranks.hardware, report=report
        )  # fmt: skip
        bar.total = tuner.reports
        return tuner.tune(ranks.key), tuner


def _regrets(tuner: Tuner, table: TunedTable) -> list[Regret]:
    return [
        tuner.regret(table, size)
        for size in tqdm(tuner.sizes, desc="scan", unit="size", disable=not sys.stderr.isatty(), leave=False)
    ]


def _rows(table: TunedTable, tuner: Tuner) -> list[dict[str, Any]]:
    """What was run for each size, and what is chosen."""
    planner = Planner("auto", table)
    rows = []
    for size in tuner.sizes:
        checks = [check for check in table.checks if sum(check.counts) == size]
        shape = StepShape(checks[0].counts, checks[0].contexts)
        chosen = planner.plan(shape.counts, shape.contexts)
        rows.append({
            "tokens": size,
            "chosen": plan_text(chosen),
            "predicted_ms": 1e3 * simulate(table.costs, shape, chosen).seconds,
            "measured_ms": {plan_text(check.plan): 1e3 * check.seconds for check in checks},
        })  # fmt: skip
    return rows


def plan_text(plan: StepPlan) -> str:
    cut = f" {plan.cut}" if plan.mode == "weave" else ""
    budget = f" on {plan.budget}" if plan.budget else ""
    return plan.mode + cut + budget + (f", narrow {plan.narrow:08b}" if plan.narrow else "")


def _text(table: TunedTable, tuner: Tuner) -> str:
    key, costs = table.key, table.costs
    cells = [
        [str(row["tokens"]), row["chosen"], f"{row['predicted_ms']:.2f}"]
        + [", ".join(f"{name} {ms:.2f}" for name, ms in sorted(row["measured_ms"].items(), key=lambda kv: kv[1]))]
        for row in _rows(table, tuner)
    ]
    threads = f", {key.threads} thread{'s' * (key.threads != 1)} each" if key.threads else ""
    link = f"{1e6 * key.link_latency:.1f} µs, {key.link_bandwidth / 1e9:.2f} GB/s" if key.link_latency else "none"
    headers = ["tokens", "chosen", "simulated ms", "measured ms, fastest first"]
    return (
        f"{key.tensor_parallel_size} ranks{threads}, {key.dtype}, {key.collective}; link: {link}; "
        f"{_contention(costs.contention)}\n{output.table(headers, cells)}"
    )


def _contention(contention: float) -> str:
    if contention >= HIDES_NOTHING:
        return "cores that compute cannot communicate meanwhile: no step is woven"
    return f"a stage beside a collective takes {contention:.0%} longer"


def _regret_text(regrets: list[Regret]) -> str:
    cells = [
        [str(r.tokens), plan_text(r.chosen), f"{1e3 * r.chosen_seconds:.2f}", plan_text(r.best)]
        + [f"{1e3 * r.best_seconds:.2f}", f"{r.chosen_seconds / r.best_seconds - 1:.1%}"]
        for r in regrets
    ]
    return "regret: the plan that is chosen against the best of a scan\n" + output.table(
        ["tokens", "chosen", "ms", "best", "ms", "regret"], cells
    )


def _regret_rows(regrets: list[Regret]) -> list[dict[str, Any]]:
    return [
        {"tokens": r.tokens, "chosen": plan_text(r.chosen), "chosen_ms": 1e3 * r.chosen_seconds}
        | {"best": plan_text(r.best), "best_ms": 1e3 * r.best_seconds}
        for r in regrets
    ]
