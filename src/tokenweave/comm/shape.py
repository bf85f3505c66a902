"""What a collective is opened for, and the checks of what is then handed to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch

from tokenweave.config import partition

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class CollectiveShape:
    """The same on every rank. timeout: seconds that any wait may take. device: where the rows lie, "cpu" or "cuda"."""

    hidden_size: int
    max_tokens: int
    dtype: torch.dtype
    lanes: int
    timeout: float
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.hidden_size < 1 or self.max_tokens < 1:
            raise ValueError(
                f"hidden_size and max_tokens must be at least 1, got {self.hidden_size} and {self.max_tokens}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {self.dtype}")
        if self.lanes not in (1, 2):
            raise ValueError(f"lanes must be 1 or 2, got {self.lanes}")
        if not 0 < self.timeout < inf:
            raise ValueError(f"timeout must be positive and finite, got {self.timeout}")

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * self.dtype.itemsize

    def rows_of(self, tokens: int, rank: int, size: int) -> int:
        """How many rows of `tokens` a rank owns."""
        own = partition(tokens, size, rank)
        return own.stop - own.start

    def check_lane(self, lane: int) -> None:
        if not 0 <= lane < self.lanes:
            raise ValueError(f"lane must be in [0, {self.lanes}), got {lane}")

    def check_tokens(self, tokens: int) -> None:
        if not 0 <= tokens <= self.max_tokens:
            raise ValueError(f"tokens must be in [0, {self.max_tokens}] (the collective's max_tokens), got {tokens}")

    def check_rows(self, name: str, tensor: torch.Tensor, count: int | None = None) -> None:
        """`tensor` is [count, hidden_size], or up to max_tokens rows; of the dtype, contiguous, on the device."""
        if tensor.dim() != 2 or tensor.shape[1] != self.hidden_size:
            raise ValueError(f"{name} must be [tokens, {self.hidden_size}], got {list(tensor.shape)}")
        if count is None:
            self.check_tokens(tensor.shape[0])
        elif tensor.shape[0] != count:
            raise ValueError(f"{name} must have {count} rows, those this rank owns, got {list(tensor.shape)}")
        self._check_memory(name, tensor, (self.dtype,))

    def check_weight(self, weight: torch.Tensor) -> None:
        if tuple(weight.shape) != (self.hidden_size,):
            raise ValueError(f"weight must be [{self.hidden_size}], got {list(weight.shape)}")
        self._check_memory("weight", weight, (self.dtype, torch.float32))

    def _check_memory(self, name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} must be {' or '.join(map(str, dict.fromkeys(dtypes)))}, got {tensor.dtype}")
        if tensor.device.type != self.device or not tensor.is_contiguous():
            where = "the CPU" if self.device == "cpu" else self.device
            raise ValueError(
                f"{name} must be contiguous and on {where}, got strides {tensor.stride()} on {tensor.device}"
            )


def check_columns(columns: torch.Tensor, widths: list[int], rank: int, size: int) -> None:
    """What `gather` is given: [n, widths[rank]], and a width per rank."""
    if len(widths) != size or min(widths) < 0:
        raise ValueError(f"widths must be {size} numbers that are not negative, got {widths}")
    if columns.dim() != 2 or columns.shape[1] != widths[rank]:
        raise ValueError(f"columns must be [n, {widths[rank]}] on rank {rank}, got {list(columns.shape)}")


def check_root(root: int, size: int) -> None:
    if not 0 <= root < size:
        raise ValueError(f"root must be in [0, {size}), got {root}")
