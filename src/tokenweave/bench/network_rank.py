"""One rank of `bench network`: python -m tokenweave.bench.network_rank SETTINGS, started by `namespaces` only.

It answers questions, a JSON line each: {"trial": ...} with what the steps took, {"record": a trial} with what happened
when in them, {"key": true} with the link as it is.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from tokenweave.comm.environment import group_from_environment
from tokenweave.execute.machine import tune_key
from tokenweave.execute.measure import TrialRunner
from tokenweave.execute.timeline import record_trial
from tokenweave.layers.kernels.warm_up import warm_up
from tokenweave.models.loading import load_model
from tokenweave.plan.step import StepPlan
from tokenweave.plan.trial import Trial


def main() -> None:
    settings = json.loads(sys.argv[1])
    os.sched_setaffinity(0, {settings["core"]})
    torch.set_num_threads(1)
    questions, answers = _questions(), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed does not come between the answers

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    answer("started")
    next(questions)  # the link is there
    dtype = getattr(torch, settings["dtype"])
    sizes = {name: settings[name] for name in ("max_tokens", "cache_tokens")}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = load_model(Path(settings["directory"]), rank=rank, size=size, dtype=dtype)
    warm_up(dtype)
    with (
        group_from_environment("distributed") as group,
        group.open_collective(model.config.hidden_size, sizes["max_tokens"], dtype, 2) as collective,
        closing(TrialRunner(model, collective, **sizes)) as runner,
    ):
        answer("ready")
        for question in questions:
            if "trial" in question:
                times = runner.run(_trial(question["trial"]))
                answer({name: array.tolist() for name, array in vars(times).items()})
            elif "record" in question:
                steps = record_trial(runner.executor, runner.cache, _trial(question["record"]))
                answer([[asdict(step) for step in round_] for round_ in steps])
            else:
                answer(asdict(tune_key(group, collective, model, max_tokens=sizes["max_tokens"])))


def _questions() -> Iterator[Any]:
    """Read by a thread of its own, which ends the process with its parent, in the middle of a step too."""
    queue: SimpleQueue[Any] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            queue.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield queue.get()


def _trial(words: dict[str, Any]) -> Trial:
    return Trial(
        counts=tuple(words["counts"]),
        contexts=tuple(words["contexts"]),
        plans=tuple(StepPlan(**plan) for plan in words["plans"]),
        rounds=words["rounds"],
        layers=words["layers"],
    )


if __name__ == "__main__":
    main()
