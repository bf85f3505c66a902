"""The line of figures that follows an answer."""

import time
from collections.abc import Iterable, Iterator

from tokenweave.engine.llm import LLM


class StreamFigures:
    """Times the pieces of one streamed answer as its reader sees them."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.first = self.last = 0.0

    def watch(self, pieces: Iterable[str]) -> Iterator[str]:
        for piece in pieces:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            yield piece

    def line(self, llm: LLM) -> str:
        """Time to first token, tokens/s after it, ranks, mode, collective."""
        completion = llm.last_completion
        tokens = len(completion.token_ids) if completion else 0
        ranks = f"{llm.config.tensor_parallel_size} rank{'s' * (llm.config.tensor_parallel_size != 1)}"
        where = f"{ranks} · {llm.mode_in_use} · {llm.collective_in_use} · {llm.dtype_in_use}"
        if not self.first:
            return f"[no text in {time.perf_counter() - self.began:.2f} s · {where}]"
        rate = (
            f"{(tokens - 1) / (self.last - self.first):.1f} tokens/s" if tokens > 1 and self.last > self.first else ""
        )
        cut = " (cut at the limit)" if completion and completion.finish_reason == "length" else ""
        parts = [f"{tokens} tokens{cut}", f"first after {1000 * (self.first - self.began):.0f} ms", rate, where]
        return f"[{' · '.join(part for part in parts if part)}]"
