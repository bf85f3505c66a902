"""What one step was and what it took."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepStats:
    """Times in seconds, as rank 0 saw them; hidden and exposed are parts of communication.

    host: scheduling, sampling and bookkeeping, during which no rank computes. requests: that had tokens in the step;
    waiting: for room. reused: tokens of newly started prompts that were in the cache already. preempted: requests.
    graph_memory: bytes of rank 0's GPU in which captured steps compute; of a replayed step the whole time is compute.
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
    reused: int
    preempted: int
    free_blocks: int
    graph_memory: int = 0
