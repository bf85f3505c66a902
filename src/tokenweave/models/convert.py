"""A model in any form as the directory that transformers would have saved."""

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from tokenweave.config import shard
from tokenweave.config.foreign import family_of, read_config, read_json
from tokenweave.layers.pieces import Piece
from tokenweave.models import gguf
from tokenweave.models.checkpoint import INDEX, SINGLE, Checkpoint, checked
from tokenweave.models.decoder import Decoder
from tokenweave.models.resolve import demo_file, resolve
from tokenweave.models.safetensors_writer import write_safetensors

_BESIDE = (".json", ".jinja", ".txt", ".model")  # endings of the files that a tokenizer and chat template are in


def convert(model: str | Path | None, target: Path, dtype: str = "auto") -> None:
    """Write the model, a directory, a .gguf file, a hub id or None for the demo model, into the new directory `target`.

    dtype: "float32", "bfloat16", "float16", or "auto" for the model's own, where tensors differ the one that holds all.
    Fused tensors are split where the family's own checkpoints are; of a tied head nothing is written.
    Raises ValueError for a model that cannot be read, or a target that is there already.
    """
    if target.exists():
        raise ValueError(f"{target} exists already; name a directory that does not")
    source = demo_file() if model is None else Path(model).expanduser()
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process of this number that was killed
    partial.mkdir(parents=True)
    try:
        if source.is_file():
            gguf.convert(source, partial, dtype)
        else:
            _convert_directory(resolve(model), partial, dtype)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _convert_directory(source: Path, target: Path, dtype: str) -> None:
    checkpoint, config = Checkpoint(source), read_json(source / "config.json")
    pieces = _pieces(source, checkpoint, fused=family_of(config).fused)
    wanted = _common_type(checkpoint, pieces) if dtype == "auto" else dtype
    if wanted not in gguf.DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; supported: auto, {', '.join(gguf.DTYPES)}")
    config.pop("torch_dtype", None)
    config["dtype"] = wanted
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in source.iterdir():
        if path.suffix in _BESIDE and path.name not in ("config.json", INDEX, "pytorch_model.bin.index.json"):
            shutil.copyfile(path, target / path.name)
    shapes = {name: tuple(piece.target.shape) for name, piece in pieces.items()}
    total = sum(map(math.prod, shapes.values())) * gguf.DTYPES[wanted].itemsize
    parts = _values(checkpoint, list(pieces.values()))
    hidden = not sys.stderr.isatty()
    with tqdm(total=total, desc=f"converting {source.name}", unit="B", unit_scale=True, disable=hidden) as bar:
        for size in write_safetensors(target / SINGLE, shapes, gguf.DTYPES[wanted], parts):
            bar.update(size)


def _pieces(source: Path, checkpoint: Checkpoint, *, fused: bool) -> dict[str, Piece]:
    """What to write under which name, in the order of the checkpoint, whose names and shapes are checked."""
    config = replace(read_config(source), max_position_embeddings=1)  # no tables of angles
    model = Decoder(config, shard(config, 1, 0), dtype=torch.float32, device="meta")
    asked = list(model.pieces())
    found = checked(asked, checkpoint)
    named = {piece.name: found_piece for piece, found_piece in zip(asked, found, strict=True)}
    if fused:
        named = {p.name: Piece(p.name, p.shape, torch.empty(p.shape, device="meta")) for p in found}
    order = {name: place for place, name in enumerate(checkpoint.names)}
    return dict(sorted(named.items(), key=lambda item: order[item[1].name]))


def _values(checkpoint: Checkpoint, pieces: list[Piece]) -> Iterator[torch.Tensor]:
    for piece in pieces:
        yield checkpoint.read(piece.name, piece.dim, piece.part)


def _common_type(checkpoint: Checkpoint, pieces: dict[str, Piece]) -> str:
    types = {checkpoint.dtype(piece.name) for piece in pieces.values()}
    return str(types.pop() if len(types) == 1 else torch.float32).removeprefix("torch.")
