"""tokenweave train: next-token training, from scratch or of a model that is there, over tensor-parallel ranks."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tokenweave.comm.ladder import choose
from tokenweave.config.foreign import read_config
from tokenweave.engine.config import COLLECTIVES, DEVICES, EngineConfig
from tokenweave.engine.device import device_for, gpu_count
from tokenweave.plan.training import TrainingPlan, plan_training
from tokenweave.train import prepare
from tokenweave.train.config import DTYPES, TrainingConfig, head_chunk
from tokenweave.train.plot import check, draw
from tokenweave.train.run import (
    CHECKPOINTS,
    MODEL,
    SETTINGS,
    TOKENS,
    Diverged,
    Finished,
    LossFile,
    Progress,
    Run,
    agree,
    carry_out,
    claimed,
    latest,
)
from tokenweave.train.start import Start, from_config, from_model

_TRAINING: dict[str, dict[str, Any]] = {
    "--steps": dict(type=int, help="of the optimizer"),
    "--batch-size": dict(type=int, help="windows of text a step"),
    "--accumulation": dict(type=int, help="parts that a step's windows are computed in, one after the other"),
    "--length": dict(type=int, help="tokens of a window"),
    "--learning-rate": dict(type=float, help="the highest, after the warm-up"),
    "--final-learning-rate": dict(type=float, help="where the cosine ends"),
    "--warmup-steps": dict(type=int, help="in which the learning rate rises"),
    "--weight-decay": dict(type=float, help="of matrices"),
    "--beta1": dict(type=float, help="AdamW's"),
    "--beta2": dict(type=float, help="AdamW's"),
    "--epsilon": dict(type=float, help="AdamW's"),
    "--clip-norm": dict(type=float, help="the longest gradient, over all ranks' weights"),
    "--label-smoothing": dict(type=float, help="probability dealt to the whole vocabulary"),
    "--z-loss": dict(type=float, help="times the squared log of the softmax's denominator"),
    "--dtype": dict(choices=DTYPES, help="of weights and activations; the optimizer keeps float32"),
    "--sequence-parallel": dict(action=argparse.BooleanOptionalAction, help="norms and residual on 1/N of the tokens"),
    "--recompute": dict(
        action=argparse.BooleanOptionalAction, help="compute activations again instead of keeping them"
    ),
    "--seed": dict(type=int, help="of new weights and of the order of the text"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="+", type=Path, help="UTF-8 text files")
    parser.add_argument(
        "--out", type=Path, required=True, help="directory of the run; one that was interrupted goes on"
    )
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--model", help="train this model further: a directory, a .gguf file or a hub id")
    start.add_argument("--new", type=Path, metavar="CONFIG", help="a config.json: new weights, and a new tokenizer")
    ranks = Run.tensor_parallel_size
    parser.add_argument("--tp", type=int, default=ranks, help=_shown("tensor parallel size: ranks", ranks))
    for name in ("held_out", "evaluate_every", "checkpoint_every"):
        default = getattr(Run, name)
        text = {"held_out": "share of the text, at its end, that is scored only"}.get(name, "steps")
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), default=default, help=_shown(text, default)
        )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default=EngineConfig.device,
        help=_shown("where the ranks compute", EngineConfig.device),
    )
    parser.add_argument(
        "--collective",
        choices=[name for name in COLLECTIVES if name != "emulated"],  # whose results are wrong
        default=Run.collective,
        help=_shown("how the ranks reach each other", Run.collective),
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the loss to this .png or .svg file")
    defaults = TrainingConfig()
    for flag, settings in _TRAINING.items():
        default = getattr(defaults, flag[2:].replace("-", "_"))
        parser.add_argument(flag, default=default, **settings | {"help": _shown(settings["help"], default)})


def run(args: argparse.Namespace) -> int:
    if args.plot:
        check(args.plot)
    _check_directory(args.out)
    if args.tp < 1:
        raise ValueError(f"tensor parallel size must be at least 1, got {args.tp}")
    config = TrainingConfig(**{field.name: getattr(args, field.name) for field in fields(TrainingConfig)})
    device = device_for(args.device, args.tp, args.collective)
    _check_device(device, args.tp, choose(args.collective, device))
    model = None if args.model is None else _directory(args.model, config.dtype)
    start = from_config(args.new) if model is None else from_model(model)
    start.check(config.length, args.tp)
    this = Run(
        out=args.out, model=model, tensor_parallel_size=args.tp, held_out=args.held_out, collective=args.collective,
        evaluate_every=args.evaluate_every, checkpoint_every=args.checkpoint_every, device=device,
    )  # fmt: skip
    with claimed(this.out):
        _carry_out(this, config, start, args)
    return 0


def _carry_out(this: Run, config: TrainingConfig, start: Start, args: argparse.Namespace) -> None:
    _prepare(this, config, start, args.text)
    if asked := prepare.dropout(this.out / MODEL):
        listed = ", ".join(f"{name} {value}" for name, value in asked.items())
        print(f"tokenweave: dropout is not applied, though the model's config has {listed}", file=sys.stderr)
    described = read_config(this.out / MODEL)
    planned = plan_training(
        described, this.tensor_parallel_size, tokens=config.tokens, dtype=config.dtype,
        head_tokens=head_chunk(config.tokens, described.vocab_size), wide_gradients=config.accumulation > 1,
        sequence_parallel=config.sequence_parallel, recompute=config.recompute, device=this.device,
    )  # fmt: skip
    losses = LossFile(this)
    try:
        _train(this, config, losses, planned)
    except Diverged as error:
        kept = latest(this.out / CHECKPOINTS)
        left = "there is no checkpoint yet" if kept is None else f"the last checkpoint, {kept}, is as it was"
        raise Diverged(f"{error}: the run ends here; {left}; a lower --learning-rate may help") from None
    if args.plot:
        draw(args.plot, losses.rows)


def _check_directory(out: Path) -> None:
    """Raises ValueError where a file is in the way of a directory."""
    for path in (out, *out.parents):
        if path.exists() and not path.is_dir():
            raise ValueError(f"--out {out} is to be a directory, and {path} is a file")


def _check_device(device: str, ranks: int, collective: str) -> None:
    """Raises ValueError where the ranks would find too few GPUs."""
    if device != "cuda":
        return
    count = gpu_count()
    if count == 0:
        raise ValueError("device 'cuda' needs a GPU that torch can use; there is none")
    if collective == "distributed" and count < ranks:
        raise ValueError(f"collective 'distributed' needs a GPU for each rank, and {ranks} ranks have {count}")


def _prepare(this: Run, config: TrainingConfig, start: Start, paths: list[Path]) -> None:
    """A new run's tokenizer and tokens; of one that is there, check that it is the same."""
    texts, digest = prepare.read_texts(paths)
    if (this.out / SETTINGS).is_file():
        if latest(this.out / CHECKPOINTS) is not None:
            if had := agree(this, config, digest, start.digest):
                print(
                    f"tokenweave: the run had {had} steps and now has {config.steps}; from its last checkpoint on the "
                    f"learning rate is that of {config.steps}",
                    file=sys.stderr,
                )
            return
        (this.out / SETTINGS).unlink()  # refused, or ended before there was anything to go on with
    if this.model is None:
        prepare.prepare_new(this.out, start, texts, config.dtype)
    else:
        prepare.prepare_from(this.out, start, this.model, config.dtype)
    count = prepare.write_tokens(this.out, texts)
    print(f"{count} tokens of {sum(map(len, texts))} characters in {this.out / TOKENS}", file=sys.stderr)
    agree(this, config, digest, start.digest)


def _train(this: Run, config: TrainingConfig, losses: LossFile, planned: TrainingPlan) -> None:
    tokens, stepped = config.batch_size * config.length, False
    with tqdm(total=config.steps, unit="step", disable=None) as bar:
        for message in carry_out(this, config):
            if isinstance(message, Progress):
                stepped = True
                losses.add(message)
                bar.update(message.step - bar.n)
                bar.set_postfix_str(f"loss {message.loss:.3f}, {tokens / message.seconds:.0f} tokens/s", refresh=False)
                if message.held_out is not None:
                    bar.write(f"step {message.step}: loss {message.loss:.4f}, held out {message.held_out:.4f}")
            elif isinstance(message, Finished):
                if message.held_out is not None:
                    bar.write(f"the run was finished; held out {message.held_out:.4f}")
            elif stepped:  # or there was no step whose memory the plan is of
                _tell_memory(message, planned)
    print(f"the model is in {this.out / MODEL}")


def _tell_memory(measured: list[Any], planned: TrainingPlan) -> None:
    """The heaviest rank's memory beside the plan's."""
    states = max(m.weights + m.gradients + m.optimizer for m in measured)
    peak = max(m.peak for m in measured)
    for name, found, expected in (
        ("weights, gradients, optimizer", states, planned.states),
        ("peak", peak, planned.peak),
    ):
        print(f"memory, {name}: {found / 1e6:.1f} MB measured, {expected / 1e6:.1f} planned ({found / expected:.3f} x)")


def _directory(model: str, dtype: str) -> Path:
    from tokenweave.models.resolve import resolve  # imports torch for a GGUF file

    return resolve(model, dtype)


def _shown(text: str, default: Any) -> str:
    shown = ("off", "on")[default] if isinstance(default, bool) else default
    return f"{text} (default: {shown})"
