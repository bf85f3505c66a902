"""One step as rank 0 describes it to every rank, itself included, and how the description travels."""

from dataclasses import dataclass, fields

import numpy as np

from tokenweave.plan.step import MODES, StepPlan


@dataclass(frozen=True)
class Step:
    """What one step runs. All arrays int32; T new tokens of R requests, flattened in request order.

    slots [R]: the row of the block table that each request holds. starts [R]: the position of its first new token.
    counts [R]: its new tokens. token_ids [T].
    sampled [S]: rows of the T for which rank 0 wants the logits or, if best_only, just the most likely token.
    scored, targets [C]: rows, and the token after each, whose log-probability is wanted.
    table_slots, table_indexes, table_blocks [K]: entries of the block table that are new since the last step.
    admitted, prompt_lengths [A]: slots that got their request in this step, and how long its prompt is.
    """

    plan: StepPlan
    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    token_ids: np.ndarray
    sampled: np.ndarray
    scored: np.ndarray
    targets: np.ndarray
    table_slots: np.ndarray
    table_indexes: np.ndarray
    table_blocks: np.ndarray
    admitted: np.ndarray
    prompt_lengths: np.ndarray
    best_only: bool = False

    def encode(self) -> bytes:
        """Little header of lengths, then the arrays: 256 decodes take 5 KB."""
        arrays = [getattr(self, name) for name in _ARRAYS]
        budget = -1 if self.plan.budget is None else self.plan.budget
        header = [
            MODES.index(self.plan.mode),
            self.plan.cut,
            budget,
            self.plan.narrow,
            self.best_only,
            *map(len, arrays),
        ]
        return np.concatenate([np.array(header, dtype=np.int32), *arrays]).tobytes()

    @staticmethod
    def decode(message: bytes) -> "Step":
        """The step that `encode` made. Raises ValueError if the message is cut short or has something behind it."""
        words = np.frombuffer(message, dtype=np.int32)
        mode, cut, budget, narrow, best_only, *lengths = words[:_HEADER].tolist()
        if len(words) != _HEADER + sum(lengths):
            raise ValueError(f"a step of {len(words)} words came, its header says {_HEADER + sum(lengths)}")
        arrays = np.split(words[_HEADER:], np.cumsum(lengths[:-1]))
        plan = StepPlan(MODES[mode], cut, None if budget < 0 else budget, narrow)
        return Step(plan, **dict(zip(_ARRAYS, arrays, strict=True)), best_only=bool(best_only))


_ARRAYS = [field.name for field in fields(Step) if field.name not in ("plan", "best_only")]
_HEADER = 5 + len(_ARRAYS)
