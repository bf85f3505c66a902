"""tokenweave doctor: what this machine offers, and which collective ranks get on it."""

import argparse
import os
import sys
from importlib.metadata import version

import torch

from tokenweave.comm.ladder import ladder


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
    print("\ncollectives for ranks on the CPU, best first:")
    chosen = False
    for rung in ladder("cpu"):
        state = rung.obstacle or ("also possible" if chosen else "chosen")
        chosen = chosen or rung.obstacle is None
        print(f"  {rung.name:<16}{state}")
    return 0
