"""Safetensors checkpoints, read slice by slice straight into a model's parameters."""

import json
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from tokenweave.layers.pieces import Piece
from tokenweave.models.names import located

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_DERIVED = ".rotary_emb.inv_freq"  # a buffer that old checkpoints carry and that follows from the config
_TIED_HEAD = "lm_head.weight"


class Checkpoint:
    """The tensors of a directory that holds model.safetensors, or its shards and their index.

    Opening reads the headers only. bytes_read counts what `read` was asked for.
    Raises ValueError that names the file if one is missing, truncated or corrupt.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.bytes_read = 0
        self._tensors: dict[str, tuple[Path, Any]] = {}  # name -> file, safetensors slice
        single, index = self.directory / SINGLE, self.directory / INDEX
        if single.is_file():
            self._open(single)
        elif index.is_file():
            self._open_shards(index)
        else:
            raise ValueError(
                f"{self.directory} holds neither {SINGLE} nor {INDEX}; weights of other formats must be converted first"
            )

    def _open_shards(self, index: Path) -> None:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {name: str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of safetensors shards: {error!r}") from None
        for file in sorted(set(files.values())):
            if Path(file).name != file or not (self.directory / file).is_file():
                raise ValueError(f"{self.directory / file} is missing, though {INDEX} names it; fetch the model again")
            self._open(self.directory / file)
        absent = [name for name in files if name not in self._tensors]
        if absent:
            raise ValueError(f"{index} names tensors that its shards do not hold: {listed(absent)}")

    def _open(self, path: Path) -> None:
        try:
            handle = safe_open(str(path), framework="pt")
            for name in sorted(handle.keys()):  # safetensors writes them in this order: reading stays sequential
                self._tensors[name] = (path, handle.get_slice(name))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is truncated or not a safetensors file ({error}); fetch it again") from None

    @property
    def names(self) -> list[str]:
        """Every tensor's name, file by file."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name][1].get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The type that the file stores. Raises ValueError for one that is not a plain float type."""
        path, view = self._tensors[name]
        if view.get_dtype() not in DTYPES:
            raise ValueError(
                f"{path}: {name} has dtype {view.get_dtype()}, which is not supported; supported: {', '.join(DTYPES)}"
            )
        return DTYPES[view.get_dtype()]

    def read(self, name: str, dim: int = 0, part: slice | None = None) -> torch.Tensor:
        """The slice `part` of dimension `dim` (all of the tensor for None) in the stored dtype.

        The result may alias the mapped file: copy it, do not write to it.
        """
        path, view = self._tensors[name]
        self.dtype(name)
        try:
            tensor = view[(slice(None),) * dim + (slice(None) if part is None else part,)]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: cannot read {name} ({error}); fetch the file again") from None
        self.bytes_read += tensor.nbytes
        return tensor


def load(pieces: Iterable[Piece], checkpoint: Checkpoint, *, rank: int = 0) -> None:
    """Copy every piece from the checkpoint into its target, converting to the target's dtype; fused tensors are cut.

    Each slice goes from the mapped file straight to its place, so nothing is held twice. Rank 0 shows a progress bar
    where stderr is a terminal, and judges left-over tensors: it alone has a piece of every tensor (the biases of
    row-parallel layers are its own).
    Raises ValueError that names every missing and every left-over tensor, or the first with another shape.
    """
    wanted = checked(pieces, checkpoint, rank=rank)
    order = {name: i for i, name in enumerate(checkpoint.names)}
    wanted.sort(key=lambda piece: order[piece.name])
    sizes = [_nbytes(piece, checkpoint) for piece in wanted]
    hidden = not (rank == 0 and sys.stderr.isatty())
    with tqdm(total=sum(sizes), desc="loading", unit="B", unit_scale=True, disable=hidden, leave=False) as bar:
        for piece, size in zip(wanted, sizes, strict=True):
            piece.target.copy_(checkpoint.read(piece.name, piece.dim, piece.part))
            bar.update(size)


def checked(pieces: Iterable[Piece], checkpoint: Checkpoint, *, rank: int = 0) -> list[Piece]:
    """The pieces as parts of the tensors that are there, in the same order. Raises ValueError as `load` does."""
    wanted = located(pieces, checkpoint.names)
    names, found_names = {piece.name for piece in wanted}, set(checkpoint.names)
    _check_names(names, found_names if rank == 0 else found_names & names, checkpoint.directory)
    for piece in wanted:
        found = checkpoint.shape(piece.name)
        if found != piece.shape:
            raise ValueError(
                f"{checkpoint.directory}: {piece.name} has shape {list(found)}, "
                f"but config.json asks for {list(piece.shape)}"
            )
    return wanted


def _nbytes(piece: Piece, checkpoint: Checkpoint) -> int:
    shape = list(piece.shape)
    if piece.part is not None:
        shape[piece.dim] = piece.part.stop - piece.part.start
    assert list(piece.target.shape) == shape, f"{piece.name}: target {list(piece.target.shape)}, slice {shape}"
    return math.prod(shape) * checkpoint.dtype(piece.name).itemsize


def _check_names(wanted: set[str], found: set[str], directory: Path) -> None:
    missing = wanted - found
    left_over = {name for name in found - wanted if name != _TIED_HEAD and not name.endswith(_DERIVED)}
    faults = [f"{what}: {listed(names)}" for what, names in (("missing", missing), ("left over", left_over)) if names]
    if faults:
        raise ValueError(f"{directory}: the tensors do not fit config.json; {'; '.join(faults)}")


def listed(names: Iterable[str]) -> str:
    """Every name on one line; those that differ only in one layer number are told as one: `layers.{0,1,2}.x`."""
    groups: dict[tuple[str, str], list[int]] = {}
    plain = []
    for name in names:
        match = re.search(r"\.(\d+)\.", name)
        if match:
            groups.setdefault((name[: match.start(1)], name[match.end(1) :]), []).append(int(match[1]))
        else:
            plain.append(name)
    for (before, after), numbers in groups.items():
        inner = ",".join(str(number) for number in sorted(numbers))
        plain.append(f"{before}{inner if len(numbers) == 1 else '{' + inner + '}'}{after}")
    return ", ".join(sorted(plain))
