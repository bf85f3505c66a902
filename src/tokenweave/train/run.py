"""A training run as its caller sees it: what is prepared, what the ranks tell, what is kept. Imports no torch.

OUT/run.json        the settings, which a resumed run must share
OUT/tokens.npy      the text as token ids, the last of them held out
OUT/model/          config.json and tokenizer; in the end the weights: a transformers directory
OUT/checkpoints/    see `train.checkpoint`
OUT/losses.jsonl    a line for each step
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenweave.comm.processes import start_ranks
from tokenweave.train.config import TrainingConfig
from tokenweave.train.heap import memory_settings

SETTINGS, TOKENS, MODEL, CHECKPOINTS, LOSSES = "run.json", "tokens.npy", "model", "checkpoints", "losses.jsonl"
STATE = "state.json"  # of a checkpoint
_HASHED = {"text": "on another text", "model": "that starts from another --new or --model"}  # their values say nothing


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where a run is and how it is carried out; a resumed run may differ in these, but for held_out.

    model: whose weights it starts from; None for new ones. held_out: the share of the text, from its end, that is
    scored and not trained on. evaluate_every, checkpoint_every: steps; the last step always does both.
    """

    out: Path
    model: Path | None = None
    tensor_parallel_size: int = 1
    held_out: float = 0.05
    evaluate_every: int = 200
    checkpoint_every: int = 200
    collective: str = "auto"
    device: str = "cpu"
    threads: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must be a share between 0 and 1, got {self.held_out}")
        if self.evaluate_every < 1 or self.checkpoint_every < 1:
            raise ValueError(
                f"evaluate_every and checkpoint_every must be at least 1, got {self.evaluate_every} and "
                f"{self.checkpoint_every}"
            )

    def evaluates(self, done: int, steps: int) -> bool:
        return done % self.evaluate_every == 0 or done == steps

    def checkpoints(self, done: int, steps: int) -> bool:
        return done % self.checkpoint_every == 0 or done == steps


@dataclass(frozen=True)
class Progress:
    """After step `step`, counted from 1. held_out: the loss on the held-out text where it was taken."""

    step: int
    loss: float
    norm: float
    learning_rate: float
    seconds: float
    held_out: float | None


class Diverged(RuntimeError):
    """Losses, gradients or weights that are not finite: nothing that follows would be."""


@dataclass(frozen=True)
class Finished:
    """held_out: of a run that had no step left to do."""

    held_out: float | None


def agree(run: Run, config: TrainingConfig, text: str, model: str) -> int | None:
    """Keep the settings of a new run; of a resumed one raise ValueError that names the first that differs.

    text, model: hashes of the text and of what the run starts from. A run may be given more steps than it had, which it
    then has: returns how many it had.
    """
    path = run.out / SETTINGS
    mine = asdict(config) | {"held_out": run.held_out, "text": text, "model": model}
    if not path.is_file():
        _write_settings(path, mine)
        return None
    theirs: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    theirs.setdefault("model", model)  # older versions did not keep it
    had = int(theirs["steps"])
    if config.steps < had:
        raise ValueError(f"{run.out} holds a run of {had} steps; steps must be at least as many, got {config.steps}")
    for name, value in mine.items():
        if theirs.get(name) == value or name == "steps":
            continue
        holds = _HASHED.get(name, f"with {name} {theirs.get(name)}, not {value}")
        raise ValueError(f"{run.out} holds a run {holds}; give another --out, or the same settings to go on with it")
    if config.steps == had:
        return None
    _write_settings(path, mine)
    return had


def _write_settings(path: Path, settings: dict[str, Any]) -> None:
    write_whole(path, json.dumps(settings, indent=1) + "\n")


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """`out`, made if need be, for this run alone until the context or the process ends, whatever ends it.

    Raises ValueError if another run has it. Leaves nothing where nothing was written.
    """
    out.mkdir(parents=True, exist_ok=True)
    directory = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{out} is in use by another run; wait for it, or give another --out") from None
        try:
            yield
        finally:
            with suppress(OSError):  # it is not empty
                out.rmdir()
    finally:
        os.close(directory)


def carry_out(run: Run, config: TrainingConfig) -> Iterator[Progress | Finished | list[Any]]:
    """Start the ranks; yields what rank 0 tells, then the list of every rank's `MeasuredMemory`."""
    settings = memory_settings(config.dtype) if run.device == "cpu" else None
    with start_ranks(
        "tokenweave.train.worker:main", run.tensor_parallel_size, (run, config),
        collective=run.collective, device=run.device, threads=run.threads, environment=settings,
    ) as ranks:  # fmt: skip
        while True:
            message = ranks.receive(0)
            yield message
            if isinstance(message, Finished):
                break
        yield ranks.results()


def latest(directory: Path) -> Path | None:
    """The last checkpoint under `directory` that was finished."""
    found = sorted(path for path in directory.glob("step-*") if (path / STATE).is_file())
    return found[-1] if found else None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What `save` was given. Raises ValueError naming the file."""
    try:
        return dict(json.loads((checkpoint / STATE).read_text(encoding="utf-8")))
    except (ValueError, OSError) as error:
        raise ValueError(f"{checkpoint / STATE} is not readable: {error}") from None


class LossFile:
    """OUT/losses.jsonl: a line for each step, from the last checkpoint's on; what came after it is written anew."""

    def __init__(self, run: Run) -> None:
        self.path = run.out / LOSSES
        found = latest(run.out / CHECKPOINTS)
        self.rows: list[dict[str, Any]] = [] if found is None else read_state(found)["rows"]
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))

    def add(self, progress: Progress) -> None:
        self.rows.append(asdict(progress))
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")


def write_whole(path: Path, text: str) -> None:
    """A file that is there whole, or as it was before."""
    beside = path.with_name(f".{path.name}.unfinished")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
