"""The learning rate of each step."""

import math

from tokenweave.train.config import TrainingConfig


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Of step 0, 1, ...: linear up to `learning_rate` at step warmup_steps, then half a cosine down to
    `final_learning_rate` at the last step."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    done = (step - config.warmup_steps) / max(1, config.steps - 1 - config.warmup_steps)
    share = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return config.final_learning_rate + share * (config.learning_rate - config.final_learning_rate)
