"""The text of one answer as its tokens come, up to a stop string."""

from collections.abc import Sequence
from typing import Protocol


class TokenText(Protocol):
    """Token ids to text, one by one; a Detokenizer."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class AnswerText:
    """Text pieces that are final: what may yet turn out to be the start of a stop string is held back.

    stopped: a stop string has come. The text ends before it.
    """

    def __init__(self, tokens: TokenText, stop: Sequence[str] = ()) -> None:
        self._tokens, self._stop = tokens, stop
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that is certain with this token."""
        return "" if self.stopped else self._release(self._tokens.push(token_id))

    def flush(self) -> str:
        """The rest, when no more tokens come."""
        if self.stopped:
            return ""
        piece = self._release(self._tokens.flush())
        rest, self._held = self._held, ""
        return piece + rest

    def _release(self, piece: str) -> str:
        self._held += piece
        matches = [place for text in self._stop if (place := self._held.find(text)) >= 0]
        if matches:
            self.stopped = True
            certain, self._held = self._held[: min(matches)], ""
            return certain
        keep = max((_overlap(self._held, text) for text in self._stop), default=0)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        return certain


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))
