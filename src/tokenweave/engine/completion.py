"""An answer, and how it grows from the engine's events."""

from dataclasses import dataclass, field

from tokenweave.engine.client import Arrival
from tokenweave.engine.events import NO_TOKEN, REASONS
from tokenweave.engine.params import SamplingParams
from tokenweave.engine.text import AnswerText
from tokenweave.engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class Timing:
    """Seconds from when the request was sent: token_times to each token, total to the end."""

    token_times: list[float]
    total: float

    @property
    def time_to_first_token(self) -> float | None:
        return self.token_times[0] if self.token_times else None

    @property
    def inter_token_latencies(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass(frozen=True)
class Completion:
    """An answer to one prompt.

    token_ids: those generated, the one that ended it included. text: without special tokens, and up to a stop string.
    logprobs: for each token {token id: log-probability} of the token and of the most likely ones, if asked for.
    finish_reason: "stop" (end of text, a stop token or stop string), "length" (max_tokens or the model's context),
    "cancelled" (a stream that was closed).
    """

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    finish_reason: str
    prompt_token_ids: list[int]
    timing: Timing


@dataclass
class Answer:
    """A completion in the making. ident: of its request. began: when that was sent."""

    ident: int
    prompt_token_ids: list[int]
    params: SamplingParams
    tokenizer: Tokenizer
    began: float = 0.0
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    _logprobs: list[dict[int, float]] = field(default_factory=list)
    _times: list[float] = field(default_factory=list)
    _pieces: list[str] = field(default_factory=list)
    _text: AnswerText | None = None

    def follow_text(self) -> None:
        """Make text token by token: for a stream, or to find a stop string. Otherwise it is made at the end."""
        if self.tokenizer.available:
            self._text = AnswerText(self.tokenizer.stream(), self.params.stop)

    def take(self, arrival: Arrival, entry: int) -> str:
        """One more token; the text that is certain with it. Raises RuntimeError if there is none to be had."""
        events = arrival.events
        token = events.token_ids[entry]
        if token == NO_TOKEN:
            raise RuntimeError(
                f"the logits after {len(self.prompt_token_ids) + len(self.token_ids)} tokens are not finite: weights "
                "that are NaN or infinite, or activations too large for the dtype"
            )
        self.token_ids.append(token)
        self._times.append(arrival.time - self.began)
        if self.params.logprobs is not None:
            self._logprobs.append(events.logprobs[entry])
        self.finish_reason = REASONS[events.reasons[entry]]
        if self._text is None:
            return ""
        piece = self._text.push(token)
        if not self._text.stopped and self.finish_reason is not None:
            piece += self._text.flush()
        if self._text.stopped:
            self.finish_reason = "stop"
        self._pieces.append(piece)
        return piece

    def completion(self, ended: float) -> Completion:
        if self._text is not None:
            text = "".join(self._pieces)
        else:
            text = self.tokenizer.decode(self.token_ids) if self.tokenizer.available else ""
        return Completion(
            text=text,
            token_ids=self.token_ids,
            logprobs=None if self.params.logprobs is None else self._logprobs,
            finish_reason=self.finish_reason or "cancelled",
            prompt_token_ids=self.prompt_token_ids,
            timing=Timing(self._times, ended - self.began),
        )
