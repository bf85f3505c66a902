"""What rank 0 tells the caller. No torch here: the caller's process starts a second faster without it."""

from dataclasses import dataclass

import numpy as np

from tokenweave.engine.stats import StepStats

REASONS = (None, "stop", "length", "not finite")  # finish reasons, by code
NO_TOKEN = -1  # in place of a token's id where logits are NaN or infinite, which ends the request as "not finite"


@dataclass(frozen=True)
class Ready:
    """The first message: the model is loaded and requests can come. plan_source: where the costs that decide how a
    step runs come from."""

    collective: str
    num_blocks: int
    plan_source: str


@dataclass(frozen=True)
class StepEvents:
    """What a step brought. idents, token_ids, reasons: one entry for each new token, `reasons` indexing REASONS.
    logprobs: by entry, {token id: log-probability}. scores: finished ones, float32, by ident."""

    idents: list[int]
    token_ids: list[int]
    reasons: list[int]
    logprobs: dict[int, dict[int, float]]
    scores: dict[int, np.ndarray]
    stats: StepStats
