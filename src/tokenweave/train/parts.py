"""A rank's parameters as parts of whole tensors: what is summed over ranks, counted once and written once."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tokenweave.comm.collective import Collective
from tokenweave.layers.pieces import Piece
from tokenweave.models.decoder import Decoder

Key = tuple[str, int, int]  # a tensor's name, and which of its rows or columns


@dataclass(frozen=True)
class Part:
    """A piece of a whole tensor that this rank holds in `parameter`, and the ranks that hold the same, in order."""

    piece: Piece
    parameter: nn.Parameter
    holders: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.piece.name

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part's region of a tensor shaped like the parameter: its gradient, a moment."""
        target = self.piece.target
        return tensor.as_strided(target.size(), target.stride(), target.storage_offset())


@dataclass(frozen=True)
class Shared:
    """A piece that several ranks hold, known to all ranks. part: this rank's, if it holds it."""

    key: Key
    count: int  # numbers in it
    part: Part | None


def parts_of(model: Decoder, collective: Collective, rank: int, size: int) -> tuple[list[Part], list[Shared]]:
    """This rank's parts, and what several ranks hold, the same list on every rank. All ranks call it together."""
    pieces = list(model.pieces())
    held = _exchanged({_key(piece): piece.target.numel() for piece in pieces}, collective, rank, size)
    holders: dict[Key, list[int]] = {}
    for other, keys in enumerate(held):
        for key in keys:
            holders.setdefault(key, []).append(other)
    memory = {parameter.untyped_storage().data_ptr(): parameter for parameter in model.parameters()}
    parts = {
        _key(piece): Part(piece, memory[piece.target.untyped_storage().data_ptr()], tuple(holders[_key(piece)]))
        for piece in pieces
    }
    counts = {key: count for keys in held for key, count in keys.items()}
    shared = [Shared(key, counts[key], parts.get(key)) for key in sorted(holders) if len(holders[key]) > 1]
    return list(parts.values()), shared


def norms_between_stages(model: Decoder) -> set[int]:
    """Ids of the parameters that executors apply, not stages."""
    return {id(parameter) for stage in model.stages for parameter in stage.norm.parameters()}


def _key(piece: Piece) -> Key:
    part = piece.part if piece.part is not None else slice(0, piece.shape[0])
    return piece.name, part.start, part.stop


def broadcast_json(value: Any, collective: Collective, rank: int, root: int) -> Any:
    """Root's value, JSON data, on every rank."""
    text = json.dumps(value).encode() if root == rank else b""
    length = collective.broadcast(torch.tensor([len(text)]), root)
    data = torch.frombuffer(bytearray(text or bytes(int(length))), dtype=torch.uint8)
    return json.loads(bytes(collective.broadcast(data, root).numpy()))


def _exchanged(own: dict[Key, int], collective: Collective, rank: int, size: int) -> Sequence[dict[Key, int]]:
    """Every rank's keys and their sizes."""
    rows = [[*key, count] for key, count in own.items()]
    ranks = [broadcast_json(rows, collective, rank, root) for root in range(size)]
    return [{(name, start, stop): count for name, start, stop, count in found} for found in ranks]
