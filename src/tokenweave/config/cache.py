"""Where the user's cache is."""

import os
from pathlib import Path


def cache_root() -> Path:
    """$XDG_CACHE_HOME/tokenweave, or ~/.cache/tokenweave."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "tokenweave"
