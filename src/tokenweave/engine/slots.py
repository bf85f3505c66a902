"""The running requests, one to a slot: numbers in arrays, so that a step's bookkeeping is a few vector operations."""

import numpy as np

from tokenweave.engine.request import Request


class Slots:
    """State of up to `count` running requests.

    tokens [count, max_context]: what is known of each, the newest token included. length: how many of them.
    computed: those whose keys and values are cached. held: blocks owned. named: blocks offered for reuse.
    order: the slots in use, by arrival.
    """

    def __init__(self, count: int, max_context: int) -> None:
        self.tokens = np.zeros((count, max_context), dtype=np.int32)  # zeros: pages are touched only as they fill
        self.length = np.zeros(count, dtype=np.int32)
        self.computed = np.zeros(count, dtype=np.int32)
        self.held = np.zeros(count, dtype=np.int32)
        self.named = np.zeros(count, dtype=np.int32)
        self.prompt_length = np.zeros(count, dtype=np.int32)
        self.scores = np.zeros(count, dtype=bool)
        self.ident = np.zeros(count, dtype=np.int64)
        self.order = np.zeros(0, dtype=np.int32)
        self.requests: list[Request | None] = [None] * count
        self._free = list(range(count - 1, -1, -1))
        self._slot_of: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def find(self, ident: int) -> int | None:
        return self._slot_of.get(ident)

    def request(self, slot: int) -> Request:
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is free"
        return request

    def take(self, request: Request) -> int:
        """Give the request a slot, the last in order; nothing of it is computed yet."""
        slot = self._free.pop()
        length = len(request.token_ids)
        self.tokens[slot, :length] = request.token_ids
        self.length[slot], self.prompt_length[slot] = length, request.prompt_length
        self.computed[slot] = self.held[slot] = self.named[slot] = 0
        self.scores[slot], self.ident[slot] = request.scores, request.ident
        self.requests[slot] = request
        self._slot_of[request.ident] = slot
        self.order = np.append(self.order, np.int32(slot))
        return slot

    def leave(self, slot: int) -> Request:
        """Free the slot; the request keeps all its tokens."""
        request = self.request(slot)
        request.token_ids = self.tokens[slot, : self.length[slot]].copy()
        self.requests[slot] = None
        del self._slot_of[request.ident]
        self.order = self.order[self.order != slot]
        self._free.append(slot)
        return request

    def append(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """One new token for each."""
        self.tokens[slots, self.length[slots]] = token_ids
        self.length[slots] += 1
