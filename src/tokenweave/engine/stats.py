"""What one step was and what it took."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepStats:
    """Times in seconds, as rank 0 saw them; hidden and exposed are parts of communication.

    host: scheduling, metadata, sampling and messages, during which no rank computes.
    """

    tokens: int
    requests: int
    waiting: int
    mode: str
    cut: int
    budget: int | None
    compute: float
    communication: float
    hidden: float
    exposed: float
    host: float
    free_blocks: int
