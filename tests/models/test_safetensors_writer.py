"""Files written tensor by tensor, read back by safetensors itself."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tokenweave.models.safetensors_writer import write_safetensors

TENSORS = {"a": torch.randn(3, 13), "empty": torch.zeros(0, 7), "b.weight": torch.randn(577), "é": torch.randn(1, 33)}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 5, 64, 10000])
def test_read_back(dtype: torch.dtype, size: int, tmp_path: Path) -> None:
    """Cut anywhere, also in the middle of a tensor or across two."""
    path, values = tmp_path / "model.safetensors", torch.cat([tensor.flatten() for tensor in TENSORS.values()])
    sizes = list(write_safetensors(path, SHAPES, dtype, values.split(size)))
    assert sum(sizes) == values.numel() * dtype.itemsize and len(sizes) == -(-values.numel() // size)
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in TENSORS.items())
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0  # the data starts aligned
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # without which transformers refuses a file


def test_values_that_do_not_fill_the_shapes(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="wrote 8 bytes of tensors, the header says"):
        list(write_safetensors(tmp_path / "model.safetensors", SHAPES, torch.float32, [torch.zeros(2)]))
