"""Checkpoints of whole tensors, so that any number of ranks resumes from them, and written whole or not at all.

    OUT/checkpoints/step-00000100/weights/model.safetensors           float32, named as in a transformers checkpoint
                                  first_moment/model.safetensors      AdamW's, under the same names
                                  second_moment/model.safetensors
                                  state.json

Every rank writes its own parts into the same files, in a directory of another name that is renamed once all is on disk.
"""

import json
import mmap
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tokenweave.comm.collective import Collective
from tokenweave.layers.pieces import Piece
from tokenweave.models.checkpoint import SINGLE, Checkpoint, checked
from tokenweave.models.safetensors_writer import header
from tokenweave.train.parts import Part, broadcast_json
from tokenweave.train.run import STATE, Diverged
from tokenweave.train.trainer import Trainer

STATES = ("weights", "first_moment", "second_moment")
UNFINISHED = ".unfinished-"
KEPT = 2
AT_ONCE = 4 << 20  # bytes of a file that are mapped and touched


def save(trainer: Trainer, directory: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Write step-`step` under `directory`; `state` is any JSON data. All ranks call it. Older checkpoints but one go.

    Raises OSError on rank 0, before anything is written, if the disk has too little room, and Diverged on all of them
    if a weight or moment is not finite; nothing is lost then.
    """
    if not trainer.finite():
        raise Diverged(f"after step {step} there are weights or moments that are not finite")
    final, unfinished = directory / f"step-{step:08d}", directory / f"{UNFINISHED}step-{step:08d}"
    first = trainer.group.rank == 0
    if first:
        for left in directory.glob(f"{UNFINISHED}*"):
            shutil.rmtree(left)
    optimizer = trainer.optimizer
    for name, tensors in zip(STATES, (optimizer.masters, optimizer.first, optimizer.second), strict=True):
        write_whole(unfinished / name, trainer, tensors, torch.float32)
    if first:
        _write(unfinished / STATE, json.dumps(dict(state)).encode())
        _sync(unfinished)
        if final.exists():
            shutil.rmtree(final)
        os.rename(unfinished, final)
        _sync(directory)
        for old in sorted(directory.glob("step-*"))[:-KEPT]:
            shutil.rmtree(old)
    trainer.sums.barrier()
    return final


def restore(trainer: Trainer, checkpoint: Path) -> None:
    """This rank's parts of weights and moments, whatever number of ranks wrote them."""
    optimizer = trainer.optimizer
    index = {id(parameter): i for i, parameter in enumerate(optimizer.parameters)}
    for name, tensors in zip(STATES, (optimizer.masters, optimizer.first, optimizer.second), strict=True):
        pieces = [replace(part.piece, target=part.of(tensors[index[id(part.parameter)]])) for part in trainer.parts]
        _read(pieces, checkpoint / name, trainer.group.rank)
    for i in range(len(optimizer.parameters)):
        optimizer.publish(i)


def _read(pieces: Iterable[Piece], directory: Path, rank: int) -> None:
    """Every piece into its target. The file is opened anew now and then: what was read of a mapping counts as the
    process's memory until it is closed."""
    opened = Checkpoint(directory)
    for piece in checked(pieces, opened, rank=rank):
        piece.target.copy_(opened.read(piece.name, piece.dim, piece.part))
        if opened.bytes_read >= AT_ONCE:
            opened = Checkpoint(directory)


def write_whole(directory: Path, trainer: Trainer, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    """`directory`/model.safetensors from tensors shaped like the parameters, by all ranks together.

    The file gets its whole size before anyone writes into it: a full disk is an error here, not a fault of a mapping.
    """
    path, collective = directory / SINGLE, trainer.sums
    shapes = _shapes(trainer.parts, collective, trainer.group.rank)
    head, offsets, end = header(shapes, dtype)
    if trainer.group.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as new:
            os.posix_fallocate(new.fileno(), 0, len(head) + end)
            new.write(head)
    collective.barrier()
    index = {id(parameter): i for i, parameter in enumerate(trainer.optimizer.parameters)}
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for part in trainer.parts:
            if part.holders[0] == trainer.group.rank:
                _write_part(memory, len(head) + offsets[part.name], part, tensors[index[id(part.parameter)]], dtype)
        memory.flush()
    collective.barrier()
    if trainer.group.rank == 0:
        _sync(path)
        _sync(directory)


def _write_part(memory: mmap.mmap, offset: int, part: Part, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """By rows of about 4 MB of the file, whose pages are let go at once: they count as the process's memory."""
    piece, count = part.piece, torch.Size(part.piece.shape).numel()
    whole = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(piece.shape)
    own = whole if piece.part is None else whole.narrow(piece.dim, piece.part.start, piece.part.stop - piece.part.start)
    rows = max(1, AT_ONCE * len(whole) // whole.nbytes)
    for there, here in zip(own.split(rows), part.of(tensor).split(rows), strict=True):
        there.copy_(here)
        memory.madvise(mmap.MADV_DONTNEED)  # of a shared mapping of a file: what was written stays


def _shapes(parts: Sequence[Part], collective: Collective, rank: int) -> dict[str, tuple[int, ...]]:
    """Every tensor's whole shape. Rank 0 has a part of each: it alone holds the biases of row-parallel layers."""
    own = {part.name: list(part.piece.shape) for part in parts}
    return {name: tuple(shape) for name, shape in broadcast_json(own, collective, rank, 0).items()}


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Put a file's data, or a directory's entries, on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
