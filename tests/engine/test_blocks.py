import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenweave.engine.blocks import ROOT, BlockPool, chain


def test_chain_tells_apart_what_differs_anywhere_before() -> None:
    def names(tokens: list[int], size: int = 2) -> list[bytes]:
        out, parent = [], ROOT
        for i in range(0, len(tokens) - size + 1, size):
            parent = chain(parent, np.array(tokens[i : i + size], dtype=np.int32))
            out.append(parent)
        return out

    assert names([1, 2, 3, 4]) == names([1, 2, 3, 4, 5])
    assert names([1, 2, 3, 4])[1] != names([9, 2, 3, 4])[1]
    assert names([1, 2, 1, 2])[0] != names([1, 2, 1, 2])[1]
    assert len({*names([0, 0]), *names([0, 1]), *names([1, 0]), *names([256, 0])}) == 4


def test_unnamed_blocks_go_first_then_the_least_recently_used() -> None:
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    pool.name(a, b"a")
    pool.name(b, b"b")
    pool.release([c])
    pool.release([b])
    pool.release([a])
    assert pool.allocate(1) == [c], "the freed block before the untouched one"
    (untouched,) = pool.allocate(1)
    assert untouched not in (a, b, c)
    assert pool.allocate(1) == [b] and pool.find([b"b"]) == []
    assert pool.find([b"a", b"b"]) == [a]


def test_a_request_gives_up_its_last_block_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for index, block in enumerate(blocks):
        pool.name(block, bytes([index]))
    pool.release(blocks)
    assert pool.allocate(1) == blocks[2:]
    assert pool.find([b"\0", b"\1", b"\2"]) == blocks[:2]


def test_no_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)


class PoolAgainstSets(RuleBasedStateMachine):
    """Any sequence of operations, beside a plain record of who owns what and what each block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.owned: list[list[int]] = []
        self.holds: dict[int, bytes] = {}  # block -> name, until it is handed out again

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        if count <= self.pool.available:
            blocks = self.pool.allocate(count)
            assert not {b for held in self.owned for b in held} & set(blocks), "a block owned twice"
            for block in blocks:
                self.holds.pop(block, None)
            self.owned.append(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

    @precondition(lambda self: any(self.owned))
    @rule(data=st.data(), name=st.sampled_from([b"x", b"y", b"z"]))
    def name(self, data: st.DataObject, name: bytes) -> None:
        block = data.draw(st.sampled_from([b for held in self.owned for b in held]))
        self.pool.name(block, name)
        if block not in self.holds and name not in self.holds.values():
            self.holds[block] = name

    @rule(names=st.lists(st.sampled_from([b"x", b"y", b"z"]), unique=True))
    def share(self, names: list[bytes]) -> None:
        found = self.pool.find(names)
        assert [self.holds[block] for block in found] == names[: len(found)]
        if len(found) < len(names):
            assert names[len(found)] not in self.holds.values()
        before = self.pool.available
        unowned = self.pool.unowned(found)
        self.pool.share(found)
        assert self.pool.available == before - unowned
        self.owned.append(found)

    @invariant()
    def counts(self) -> None:
        owners = [sum(block in held for held in self.owned) for block in range(9)]
        assert [self.pool.owners(block) for block in range(9)] == owners
        assert self.pool.available == owners.count(0)


TestPoolAgainstSets = PoolAgainstSets.TestCase
