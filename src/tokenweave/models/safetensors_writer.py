"""A safetensors file written tensor by tensor, so that no more than a part of one is in memory."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def header(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> tuple[bytes, dict[str, int], int]:
    """The beginning of a file of these tensors, where each tensor's data lies behind it, and where they all end."""
    entries: dict[str, dict[str, Any]] = {}
    starts, offset = {}, 0
    for name, shape in shapes.items():
        starts[name], end = offset, offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    return len(text).to_bytes(8, "little") + text, starts, offset


def write_safetensors(
    path: Path, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, parts: Iterable[torch.Tensor]
) -> Iterator[int]:
    """Write the tensors of `shapes`, in that order, all of `dtype`; yields the bytes written, part by part.

    parts: their values, flattened one after the other and cut anywhere. The file is on disk when the iterator ends.
    """
    head, _, end = header(shapes, dtype)
    written = 0
    with open(path, "wb") as file:
        file.write(head)
        for part in parts:
            size = file.write(part.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().data)
            written += size
            yield size
        file.flush()
        os.fsync(file.fileno())
    assert written == end, f"{path}: wrote {written} bytes of tensors, the header says {end}"
