"""What the environment asks of the plugin, and whether this vLLM is one it is known to work in."""

import os
from dataclasses import dataclass

VARIABLE = "TOKENWEAVE_VLLM"
MODES = ("auto", "serial", "reordered", "fused", "weave")
TESTED = (0, 32)  # vLLM releases 0.32.x: the interfaces used here change from one minor release to the next


@dataclass(frozen=True)
class Settings:
    """mode: one of MODES, or "off". asked: the user has set it."""

    mode: str
    asked: bool

    @staticmethod
    def of_environment() -> "Settings":
        """From TOKENWEAVE_VLLM. A value that is not known turns the plugin off; `obstacle` says so."""
        value = os.environ.get(VARIABLE, "").strip().lower()
        return Settings("off" if value in ("0", "false", "no") else value or "auto", bool(value))


def obstacle(settings: Settings) -> str | None:
    """Why the plugin is off in this environment, in words; None if it is on."""
    if settings.mode == "off":
        return f"{VARIABLE} says so"
    if settings.mode not in MODES:
        return f"{VARIABLE} must be off or one of {', '.join(MODES)}, got {settings.mode!r}"
    from vllm import __version__

    if release(__version__) != TESTED:
        tested = ".".join(map(str, TESTED))
        return f"it is tested with vLLM {tested}, and this is {__version__}"
    return None


def release(version: str) -> tuple[int, ...]:
    """Major and minor number: (0, 32) of "0.32.1+cpu"; () if there are none."""
    parts = version.split(".")[:2]
    return tuple(map(int, parts)) if len(parts) == 2 and all(part.isdigit() for part in parts) else ()
