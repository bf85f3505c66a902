"""Who owns which block of the paged cache: reference counts, and reuse of blocks by what they hold."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

ROOT = b""  # the chain's value before the first block of a prompt


def chain(parent: bytes, token_ids: np.ndarray) -> bytes:
    """Name of a full block: a hash of every token from the start of the prompt to the block's end.

    token_ids: int32, the block's own tokens; `parent` names the block before it, ROOT for the first.
    16 bytes of BLAKE2b: a chance collision among 2**40 blocks has probability 2**-49.
    """
    return hashlib.blake2b(token_ids.tobytes(), digest_size=16, key=parent).digest()


class BlockPool:
    """`num_blocks` blocks, each free, owned by one or more requests, or kept for what it holds.

    A block whose last owner lets go of it keeps its name if it has one, and is the last to be taken for something else:
    unnamed free blocks go first, the most recently freed before those never touched, so that memory is touched as late
    as possible; then named ones, the least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._owners = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks
        self._named: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._kept)

    def owners(self, block: int) -> int:
        return self._owners[block]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, each with one owner. The caller has looked at `available`."""
        assert count <= self.available, f"{count} blocks wanted, {self.available} available"
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._kept.popitem(last=False)
            name = self._names[block]
            assert name is not None
            del self._named[name]
            self._names[block] = None
        self._owners[block] = 1
        return block

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The blocks that hold the longest known prefix of `names`. They get no owner: `share` does that."""
        found = []
        for name in names:
            block = self._named.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def unowned(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` count as available now and would no longer once shared."""
        return sum(not self._owners[block] for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """One more owner for each."""
        for block in blocks:
            if not self._owners[block]:
                del self._kept[block]
            self._owners[block] += 1

    def name(self, block: int, name: bytes) -> None:
        """Offer an owned block, now full and computed, to later requests. The first block of a name keeps it."""
        assert self._owners[block] > 0
        if self._names[block] is None and name not in self._named:
            self._names[block] = name
            self._named[name] = block

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less for each of a request's blocks, given in order: the last is the first to be reused."""
        for block in reversed(blocks):
            assert self._owners[block] > 0, f"block {block} released without an owner"
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if self._names[block] is None:
                self._free.append(block)
            else:
                self._kept[block] = None
