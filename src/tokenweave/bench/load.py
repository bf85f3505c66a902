"""tokenweave bench load: reading a checkpoint into the ranks, beside only reading as many bytes.

Both from the page cache: what the disk takes is not in the figures. Each rank's bytes are counted.
"""

import argparse
import math
import mmap
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from tokenweave.bench import output
from tokenweave.comm import Group, launch
from tokenweave.config import ModelConfig, shard
from tokenweave.config.foreign import read_config
from tokenweave.models.checkpoint import SINGLE, Checkpoint, load
from tokenweave.models.decoder import Decoder
from tokenweave.models.resolve import resolve
from tokenweave.models.safetensors_writer import write_safetensors

PART = 1 << 24  # bytes at a time


@dataclass(frozen=True)
class Loaded:
    """One rank's part of one round. seconds: of loading, and of reading as many bytes to fresh memory."""

    rank: int
    load: float
    read: float
    bytes_read: int
    bytes_held: int  # at the checkpoint's types


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="directory, .gguf file or hub id; default: random weights in a file")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of random weights, bfloat16 (default: 4)")
    parser.add_argument("--tp", type=int, default=2, help="tensor parallel size (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="after one that is not counted (default: 3)")
    output.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if not 0 < args.gigabytes < math.inf or args.rounds < 1:
        raise ValueError("--gigabytes must be more than 0, and --rounds at least 1")
    if args.plot:
        output.check_plot(args.plot)
    with tempfile.TemporaryDirectory(prefix="tokenweave-load-") as temporary:
        if args.model is None:
            write_random(Path(temporary), args.gigabytes)
        directory = Path(temporary) if args.model is None else resolve(args.model)
        found = launch(load_and_read, args.tp, args=(directory, args.rounds), timeout=600.0)
    rows = [
        {
            "rank": rounds[0].rank,
            "GB read": rounds[0].bytes_read / 1e9,
            "GB held": rounds[0].bytes_held / 1e9,
            "load s": median(one.load for one in rounds),
            "read s": median(one.read for one in rounds),
            "load ÷ read": median(one.load / one.read for one in rounds),
        }
        for rounds in found
    ]
    print(
        output.table(
            list(rows[0]), [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in r.values()] for r in rows]
        )
    )
    if args.json:
        output.write_json(args.json, [asdict(one) for rounds in found for one in rounds])
    if args.plot:
        _draw(rows, args.plot)
    return 0


def _draw(rows: list[dict[str, float]], path: str) -> None:
    figure, axes = output.figure()
    for place, what in enumerate(("read s", "load s")):
        axes.bar([row["rank"] + 0.4 * place - 0.2 for row in rows], [row[what] for row in rows], 0.38, label=what[:-2])
    axes.set(xlabel="rank", ylabel="seconds", xticks=[row["rank"] for row in rows])
    axes.legend()
    figure.savefig(path)


def write_random(directory: Path, gigabytes: float) -> None:
    """A Llama checkpoint of about that size. The values do not matter: one buffer again and again."""
    layers = max(1, round(gigabytes / 0.1217 - 2.2))  # GB of a layer; embedding and head are 2.2 of them
    described = (
        '{"architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192,'
        ' "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096, "dtype": "bfloat16",'
        f' "num_hidden_layers": {layers}}}'
    )
    (directory / "config.json").write_text(described, encoding="utf-8")
    model = _undone(read_config(directory), 1, 0, torch.bfloat16, "meta")
    shapes = {piece.name: piece.shape for piece in model.pieces()}
    buffer = torch.randn(PART, dtype=torch.bfloat16)

    def parts() -> Iterator[torch.Tensor]:
        for shape in shapes.values():
            left = math.prod(shape)
            while left:
                yield buffer[: min(left, PART)]
                left -= min(left, PART)

    for _ in write_safetensors(directory / SINGLE, shapes, torch.bfloat16, parts()):
        pass


def load_and_read(group: Group, directory: Path, rounds: int) -> list[Loaded]:
    """What a rank runs."""
    found = [_round(group, directory) for _ in range(rounds + 1)]
    return found[1:]


def _round(group: Group, directory: Path) -> Loaded:
    config = read_config(directory)
    dtype = getattr(torch, config.dtype)
    began = time.perf_counter()
    checkpoint = Checkpoint(directory)
    model = _undone(config, group.size, group.rank, dtype, "cpu")
    load(model.pieces(), checkpoint, rank=group.rank)
    loaded = time.perf_counter() - began
    held = sum(piece.target.numel() * checkpoint.dtype(piece.name).itemsize for piece in model.pieces())
    del model
    files = sorted(directory.glob("*.safetensors"))
    return Loaded(group.rank, loaded, _read(files, group.rank * held, held), checkpoint.bytes_read, held)


def _undone(config: ModelConfig, size: int, rank: int, dtype: torch.dtype, device: str) -> Decoder:
    """A rank's part before it is loaded."""
    return Decoder(config, shard(config, size, rank), dtype=dtype, device=device)


def _read(files: list[Path], start: int, count: int) -> float:
    """Seconds to read `count` bytes of the files from `start` on, into memory as fresh as a model's."""
    memory, done = mmap.mmap(-1, max(count, 1)), 0
    began = time.perf_counter()
    with memoryview(memory) as view:
        for file in files:
            size = file.stat().st_size
            skipped = min(start, size)
            start -= skipped
            with open(file, "rb", buffering=0) as opened:
                opened.seek(skipped)
                while done < count and (got := opened.readinto(view[done : min(done + PART, count)])):
                    done += got
    seconds = time.perf_counter() - began
    memory.close()
    return seconds
