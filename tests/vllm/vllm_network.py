"""Prefill in vLLM on two ranks with a slow link between them, woven against fused and stock: python vllm_network.py

Each rank has a core and a network namespace of its own; needs root and iproute2. As many pairs, in turns, as --pairs.
"""

import argparse
import os
import statistics
from pathlib import Path

from vllm_network_rank import ENGINES

from tokenweave.bench.namespaces import NetworkRanks
from tokenweave.integrations.vllm.benchmark import interval


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[1000.0], help="Mbit/s (default: 1000)")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--stock-as-it-is", action="store_true", help="leave vLLM's own choice of shared memory alone")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    settings = {
        "layers": args.layers, "dtype": args.dtype, "tokens": args.tokens,
        "without_shared_memory": not args.stock_as_it_is,
    }  # fmt: skip
    with NetworkRanks("vllm_network_rank", settings) as ranks:
        ranks.set_rate(args.rates[0] * 1e6)
        ranks.ask("go")
        for rate in args.rates:
            ranks.set_rate(rate * 1e6)
            seconds: dict[str, list[float]] = {name: [] for name in ENGINES}
            for turn in range(args.pairs + 1):
                for name in list(ENGINES)[:: 1 if turn % 2 else -1]:
                    found = max(ranks.ask({"engine": name, "turn": turn, "tokens": args.tokens}))
                    if turn:  # the first warms up
                        seconds[name].append(found)
            report(rate, args.tokens, seconds)


def report(rate: float, tokens: int, seconds: dict[str, list[float]]) -> None:
    medians = ", ".join(f"{name} {1e3 * statistics.median(times):.0f} ms" for name, times in seconds.items())
    print(f"{rate:g} Mbit/s, {tokens} tokens: {medians}")
    for other in ("vLLM", "fused"):
        ratios = [a / b for a, b in zip(seconds["weave"], seconds[other], strict=True)]
        lowest, highest = interval(ratios)
        print(f"  woven ÷ {other}: {statistics.median(ratios):.3f}, 95 % from {lowest:.3f} to {highest:.3f}")


if __name__ == "__main__":
    main()
