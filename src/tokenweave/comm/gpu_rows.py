"""What a rank's GPU does by itself where rows go to the ranks and back by a library: sums, norms, and keeping count."""

from dataclasses import dataclass

import torch

from tokenweave.comm.kernels.loaded import PlainRows, plain_rows
from tokenweave.comm.operations import Operation
from tokenweave.comm.shape import CollectiveShape
from tokenweave.comm.vigil import PROGRESS_WORDS


@dataclass(frozen=True)
class PackedLane:
    """rows: [size * most own rows, hidden], of each rank as many as this rank owns, one rank's behind another's.
    tables: int64 [most own rows + 1, size or one more]; line n: where the ranks' n rows each begin."""

    rows: torch.Tensor
    tables: torch.Tensor

    @staticmethod
    def of(shape: CollectiveShape, size: int, device: torch.device) -> "PackedLane":
        most = -(-shape.max_tokens // size)
        rows = torch.empty(size * most, shape.hidden_size, dtype=shape.dtype, device=device)
        width = size + size % 2  # so that every line begins at a multiple of 16 bytes
        steps = torch.arange(most + 1, device="cpu")[:, None] * torch.arange(width, device="cpu")
        return PackedLane(rows, (rows.data_ptr() + steps * shape.row_bytes).to(device))


class GpuRows:
    """progress: int64 [lanes, PROGRESS_WORDS], which the GPU writes; see `vigil.Progress`."""

    def __init__(self, shape: CollectiveShape, size: int, device: torch.device) -> None:
        from tokenweave.comm.kernels import progress as kernels

        self._device, self._kernels = device, kernels
        self._plain: PlainRows = plain_rows(shape.dtype, shape.hidden_size, device, size=size)
        self.progress = torch.zeros(shape.lanes, PROGRESS_WORDS, dtype=torch.int64, device="cpu").pin_memory()
        counts = torch.zeros(shape.lanes, PROGRESS_WORDS, dtype=torch.int64, device=device)
        self._lanes = list(zip(counts, self.progress, strict=True))
        self.begin(0, (0, 0, 0))  # compiled before a capture
        self.finish(0)
        torch.cuda.synchronize(device)

    def begin(self, lane: int, words: tuple[int, int, int]) -> None:
        """The lane's next operation, words being what it is, has come to its turn on the current stream."""
        self._kernels.begin[(1,)](*self._lanes[lane], *words, num_warps=1)

    def finish(self, lane: int) -> None:
        """It is done."""
        self._kernels.finish[(1,)](*self._lanes[lane], num_warps=1)

    def combine(
        self, operation: Operation, packed: PackedLane, rows: torch.Tensor, weight: torch.Tensor, *, own: int,
        eps: float, blocks: int,
    ) -> None:  # fmt: skip
        """This rank's part of an operation, on its `own` rows as all ranks have sent them, in the place of which come
        those that go to each; see `kernels.plain`."""
        table = packed.tables[own]
        self._plain.move(operation, table, table, rows, weight, first=0, own=own, eps=eps, blocks=blocks)

    def settle(self) -> bool:
        """Wait for the current stream; False in a capture, where there is nothing to wait for."""
        if torch.cuda.is_current_stream_capturing():
            return False
        torch.cuda.current_stream(self._device).synchronize()
        return True

    def synchronize(self) -> None:
        """Wait for all that has been launched."""
        torch.cuda.synchronize(self._device)
