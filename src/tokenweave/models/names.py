"""Where a checkpoint holds what a layer asks for: in a tensor of its own, or in a fused one."""

from collections.abc import Iterable
from dataclasses import replace

from tokenweave.layers.pieces import Piece

# Fused tensors: their parts one after another, along the first dimension.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_FUSED_OF = {part: fused for fused, parts in FUSED.items() for part in parts}


def located(pieces: Iterable[Piece], stored: Iterable[str]) -> list[Piece]:
    """The pieces as parts of the tensors that a checkpoint has, whose names are `stored`.

    One that is there neither by itself nor as a part of a fused tensor keeps its name, and is missed by that.
    """
    wanted, names = list(pieces), set(stored)
    shapes = {piece.name: piece.shape for piece in wanted}
    return [piece if piece.name in names else _in_fused(piece, names, shapes) for piece in wanted]


def _in_fused(piece: Piece, stored: set[str], shapes: dict[str, tuple[int, ...]]) -> Piece:
    path, label, kind = ["", "", *piece.name.rsplit(".", 2)][-3:]
    fused = _FUSED_OF.get(label)
    if fused is None or f"{path}.{fused}.{kind}" not in stored:
        return piece
    rows = [shapes[f"{path}.{part}.{kind}"][0] for part in FUSED[fused]]
    start = sum(rows[: FUSED[fused].index(label)])
    own = piece.part or slice(0, piece.shape[0])
    return replace(
        piece,
        name=f"{path}.{fused}.{kind}",
        shape=(sum(rows), *piece.shape[1:]),
        part=slice(start + own.start, start + own.stop),
    )
