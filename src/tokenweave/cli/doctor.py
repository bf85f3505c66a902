"""tokenweave doctor: what this machine offers, and which collective ranks get on it."""

import argparse
import os
import sys
from importlib.metadata import version

import torch

from tokenweave.comm.devices import gpu_ladder, gpus_here
from tokenweave.comm.ladder import Rung, ladder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    facts = {
        "tokenweave": version("tokenweave"),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cores": str(len(os.sched_getaffinity(0))),
        "vector unit": torch.backends.cpu.get_cpu_capability(),
        "GPUs": str(torch.cuda.device_count()) if torch.cuda.is_available() else "none that torch can use",
    }
    for name, value in facts.items():
        print(f"{name:<14}{value}")
    gpus = gpus_here()
    for gpu in gpus:
        reached = ", ".join(map(str, sorted(gpu.peers))) or "no other"
        print(
            f"GPU {gpu.number:<10}{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, reaches the "
            f"memory of GPU {reached}; multicast: {'yes' if gpu.multicast else 'no'}"
        )
    _print_rungs("the CPU", ladder("cpu"))
    if gpus:
        _print_rungs("the GPUs, one each", gpu_ladder(gpus, os.environ))
    return 0


def _print_rungs(place: str, rungs: list[Rung]) -> None:
    print(f"\ncollectives for ranks on {place}, best first:")
    chosen = False
    for rung in rungs:
        state = rung.obstacle or ("also possible" if chosen else "chosen")
        chosen = chosen or rung.obstacle is None
        print(f"  {rung.name:<22}{state}")
