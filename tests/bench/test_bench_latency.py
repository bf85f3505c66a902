"""What `tokenweave bench latency` runs: engines of the type that their row says."""

import argparse
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tokenweave.bench import latency
from tokenweave.cli.main import main


@pytest.mark.parametrize(
    "words, expected",
    [
        ([], ["float32", "bfloat16"]),
        (["some/model"], ["float32", "bfloat16"]),
        (["Llama-3.1-8B"], ["bfloat16"]),
        (["Llama-3.1-8B", "--dtype", "float32", "float16"], ["float32", "float16"]),
    ],
)
def test_rows_are_of_the_types_they_name(
    words: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    opened: list[dict[str, Any]] = []

    def engine(model: Any, **options: Any) -> Any:
        opened.append(options)
        return nullcontext()

    monkeypatch.setattr(latency, "LLM", engine)
    parser = argparse.ArgumentParser()
    latency.add_arguments(parser)
    args = parser.parse_args([*words, "--tp", "2"])
    with ExitStack() as stack:
        rows = [row for dtype in latency._dtypes(args) for row in latency._competitors(args, dtype, stack)]
    assert [row.dtype for row in rows] == [options["dtype"] for options in opened] == expected
    assert all(options.get("weights", "checkpoint") == ("random" if "Llama-3.1-8B" in words else "checkpoint")
               for options in opened)  # fmt: skip


def test_dimensions_alone_cannot_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", "Llama-3.1-8B", "--transformers"]) == 2
    assert "--transformers needs a model with weights" in capsys.readouterr().err


def test_a_decode_beyond_the_context_is_refused() -> None:
    class Engine:
        context = 100

    with pytest.raises(ValueError, match="16 tokens and 85 more are more than the context, 100"):
        latency._tokenweave(Engine())([5] * 16, 85)  # type: ignore[arg-type]
