import pytest

from tokenweave.engine.text import AnswerText


class Characters:
    """Token i is character i; every third waits for the next, as half a character would."""

    def __init__(self, text: str) -> None:
        self.text, self.held = text, ""

    def push(self, token_id: int) -> str:
        self.held += self.text[token_id]
        if token_id % 3 == 2:
            return ""
        piece, self.held = self.held, ""
        return piece

    def flush(self) -> str:
        return self.held


@pytest.mark.parametrize("text", ["", "a", "hello world", "aaab", "abababac", "xx\n\nxx\n", "ab"])
@pytest.mark.parametrize(
    "stop",
    [(), ("o",), ("aab",), ("abac", "bab"), ("\n\n",), ("zzz",), ("ab", "a"), ("hello world",), ("d", "ld", "world")],
)
def test_same_text_as_searching_the_whole(text: str, stop: tuple[str, ...]) -> None:
    answer = AnswerText(Characters(text), stop)
    pieces = []
    for token in range(len(text)):
        pieces.append(answer.push(token))
        if answer.stopped:
            break
    pieces.append(answer.flush())
    shown = "".join(pieces)
    places = [text.find(s) for s in stop if s in text]
    if not places:
        assert shown == text and not answer.stopped
        return
    # the first stop string to be complete wins, as characters come (one or two at a time)
    assert answer.stopped and shown == text[: len(shown)] and any(text.startswith(s, len(shown)) for s in stop)
    assert not any(s in shown for s in stop)


def test_text_is_not_held_back_without_need() -> None:
    answer = AnswerText(Characters("one two"), ("three",))
    assert answer.push(0) + answer.push(1) == "on"
    answer = AnswerText(Characters("thx"), ("three",))
    assert [answer.push(0), answer.push(1), answer.push(2), answer.flush()] == ["", "", "", "thx"]
