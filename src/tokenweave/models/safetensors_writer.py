"""A safetensors file written tensor by tensor, so that no more than a part of one is in memory."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_safetensors(
    path: Path, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, parts: Iterable[torch.Tensor]
) -> Iterator[int]:
    """Write the tensors of `shapes`, in that order, all of `dtype`; yields the bytes written, part by part.

    parts: their values, flattened one after the other and cut anywhere. The file is on disk when the iterator ends.
    """
    entries, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)  # the data starts aligned
    written = 0
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for part in parts:
            size = file.write(part.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().data)
            written += size
            yield size
        file.flush()
        os.fsync(file.fileno())
    assert written == offset, f"{path}: wrote {written} bytes of tensors, the header says {offset}"
