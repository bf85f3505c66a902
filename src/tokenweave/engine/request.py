"""A request as the engine's core holds it."""

from dataclasses import dataclass, field

import numpy as np

from tokenweave.engine.params import SamplingParams


@dataclass(eq=False)
class Request:
    """One prompt and what was asked for it.

    ident: unique among live requests. token_ids: int32, the prompt, with what was generated since while the request
    waits again after a preemption. prompt_length: of them, the prompt. limit: the length at which it is finished.
    seed: of its random draws. params None: the prompt is scored, nothing is generated.
    block_names: the hash chain of its full blocks, as far as it has been needed.
    """

    ident: int
    token_ids: np.ndarray
    params: SamplingParams | None
    limit: int
    seed: int = 0
    prompt_length: int = 0
    block_names: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.token_ids)

    @property
    def scores(self) -> bool:
        return self.params is None
