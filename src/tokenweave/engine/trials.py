"""Rank processes that run steps of the caller's making, for tuning and benchmarks."""

from pathlib import Path
from types import TracebackType

from tokenweave.comm.processes import start_ranks
from tokenweave.config.foreign import read_config
from tokenweave.engine.config import EngineConfig
from tokenweave.engine.llm import resolved
from tokenweave.models.resolve import resolve
from tokenweave.plan.hardware import Hardware
from tokenweave.plan.table import TuneKey
from tokenweave.plan.trial import Trial, TrialResult

WORKER = "tokenweave.execute.measure:main"


class TrialRanks:
    """A model on as many ranks, threads and cores as `LLM` would run it on with the same EngineConfig. A context
    manager. key, hardware: of rank 0, where plans are made. context: the most keys of a request that surely fit.

    max_tokens: new tokens of a trial. cache_tokens: room for the contexts of all its requests, in whole blocks.

    Raises ValueError as LLM does.
    """

    def __init__(
        self, model: str | Path | None, config: EngineConfig, *, max_tokens: int, cache_tokens: int = 0
    ) -> None:
        directory = resolve(model, config.dtype)
        self.model_config = read_config(directory)
        config = resolved(config, self.model_config)
        assert config.max_model_len is not None
        max_tokens = max(max_tokens, config.max_tokens_per_step)  # the buffers that an engine has
        self.context = min(config.max_model_len, 2 * max_tokens)
        self._ranks = start_ranks(
            WORKER,
            config.tensor_parallel_size,
            (directory, config.dtype, max_tokens, max(cache_tokens, 2 * max_tokens), config.weights),
            collective=config.collective,
            device=config.device,
            timeout=config.timeout,
            threads=config.threads,
            pin=config.pin,
            emulation=config.emulation,
        )
        try:
            self.key: TuneKey
            self.hardware: Hardware
            here = [self._ranks.receive(rank) for rank in range(self._ranks.size)]
            self.key, self.hardware = here[0].key, here[0].hardware
        except BaseException:
            self._ranks.close(grace=0.0)
            raise

    def run(self, trial: Trial) -> TrialResult:
        for rank in range(self._ranks.size):
            self._ranks.send(rank, trial)
        return TrialResult([self._ranks.receive(rank) for rank in range(self._ranks.size)])

    def __enter__(self) -> "TrialRanks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            for rank in range(self._ranks.size):
                self._ranks.send(rank, None)
        self._ranks.close(grace=1.0 if kind is None else 0.0)
