import numpy as np

from tokenweave.engine.params import SamplingParams
from tokenweave.engine.request import Request
from tokenweave.engine.slots import Slots


def request(ident: int, tokens: list[int]) -> Request:
    return Request(ident, np.array(tokens, dtype=np.int32), SamplingParams(), 9)


def test_a_request_leaves_with_all_its_tokens() -> None:
    slots = Slots(3, 9)
    places = [slots.take(request(ident, [ident] * (ident + 1))) for ident in range(3)]
    assert slots.free == 0 and slots.order.tolist() == places
    slots.append(np.array([places[0], places[2]]), np.array([50, 52]))
    left = slots.leave(places[0])
    assert (left.ident, left.token_ids.tolist(), left.prompt_length) == (0, [0, 50], 1)
    assert slots.find(0) is None and slots.find(2) == places[2]
    other = slots.take(request(7, [9] * 9))
    assert other == places[0] and left.token_ids.tolist() == [0, 50]
    slots.leave(other)
    again = slots.take(left)
    assert again == places[0] and slots.order.tolist() == [places[1], places[2], again]
    assert (slots.length[again], slots.prompt_length[again], slots.computed[again]) == (2, 1, 0)
