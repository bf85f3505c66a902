"""TokenWeave: tensor-parallel inference that hides its communication."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenweave.engine.llm import LLM
    from tokenweave.engine.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Imported on first use: the ranks and `tokenweave plan` need neither."""
    if name == "LLM":
        from tokenweave.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from tokenweave.engine.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'tokenweave' has no attribute {name!r}")
