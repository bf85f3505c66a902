"""Rank 0's messages to callers on other hosts, as JSON: what comes from a socket is never unpickled."""

import json
from dataclasses import asdict

import numpy as np

from tokenweave.engine.events import Ready, StepEvents
from tokenweave.engine.stats import StepStats


def encode(message: Ready | StepEvents) -> bytes:
    if isinstance(message, Ready):
        return json.dumps({"ready": asdict(message)}).encode()
    words = {
        "idents": message.idents,
        "token_ids": message.token_ids,
        "reasons": message.reasons,
        "logprobs": [[entry, list(found.items())] for entry, found in message.logprobs.items()],
        "scores": [[ident, found.tolist()] for ident, found in message.scores.items()],
        "stats": asdict(message.stats),
    }
    return json.dumps({"events": words}).encode()


def decode(message: bytes) -> Ready | StepEvents:
    """What `encode` was given. Numbers come back to the last bit."""
    words = json.loads(message)
    if "ready" in words:
        return Ready(**words["ready"])
    words = words["events"]
    return StepEvents(
        words["idents"],
        words["token_ids"],
        words["reasons"],
        {entry: {token: logprob for token, logprob in found} for entry, found in words["logprobs"]},
        {ident: np.array(found, dtype=np.float32) for ident, found in words["scores"]},
        StepStats(**words["stats"]),
    )
