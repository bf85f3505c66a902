"""Bad input on the command line: one clear line, exit code 2, nothing left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, save

from tokenweave.cli.main import main
from tokenweave.models.resolve import demo_file

pytestmark = pytest.mark.started


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(FAMILIES[0], tmp_path_factory.mktemp("bad"))


def copied(model: Path, to: Path, **changes: object) -> Path:
    to.mkdir()
    for file in model.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps(config))
    return to


def refused(capfd: pytest.CaptureFixture[str], words: list[str], *expected: str) -> None:
    """The command exits with 2 and one line that holds `expected`."""
    try:
        code = main(words)
    except SystemExit as error:  # argparse's own refusals
        code = int(error.code or 0)
    lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("usage:") and "[-" not in line]
    assert code == 2, lines
    assert len([line for line in lines if "error:" in line]) == 1, lines
    line = next(line for line in lines if "error:" in line)
    assert all(text in line for text in expected), line
    assert not children(), "rank processes are left"


def children() -> list[str]:
    out = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True).stdout
    return [line for line in out.splitlines() if "tokenweave" in line]


def generate(model: Path | str, *more: str) -> list[str]:
    return ["generate", "--raw", "Hello", "--model", str(model), *more]


def test_no_such_model(capfd, tmp_path) -> None:  # noqa: ANN001
    refused(capfd, generate(tmp_path / "none"), "no such model")
    refused(capfd, generate(tmp_path / "none.gguf"), "no such model")


def test_directory_without_config(capfd, tmp_path) -> None:  # noqa: ANN001
    refused(capfd, generate(tmp_path), "has no config.json")


def test_architecture_and_quantization_not_supported(capfd, tmp_path, model) -> None:  # noqa: ANN001
    other = copied(model, tmp_path / "a", architectures=["GPT2LMHeadModel"])
    refused(capfd, generate(other), "GPT2LMHeadModel", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
    quantised = copied(model, tmp_path / "q", quantization_config={"quant_method": "awq"})
    refused(capfd, generate(quantised), "quantization_config", "awq")


def test_truncated_files(capfd, tmp_path, model) -> None:  # noqa: ANN001
    cut = copied(model, tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refused(capfd, generate(cut), "model.safetensors", "truncated")
    gguf = tmp_path / "cut.gguf"
    with open(demo_file(), "rb") as file:
        gguf.write_bytes(file.read(5_000_000))
    refused(capfd, generate(gguf), "cut.gguf")


def test_wrong_shape_is_named(capfd, tmp_path, model) -> None:  # noqa: ANN001
    wrong = copied(model, tmp_path / "wrong")
    tensors = load_file(wrong / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(64, 149)
    save_file(tensors, wrong / "model.safetensors", {"format": "pt"})
    refused(capfd, generate(wrong, "--tp", "2"), "model.layers.1.mlp.down_proj.weight", "[64, 149]", "[64, 150]")


def test_settings_that_cannot_work(capfd, model) -> None:  # noqa: ANN001
    refused(capfd, generate(model, "--tp", "5"), "5", "4")
    refused(capfd, generate(model, "--tp", "0"), "at least 1")
    refused(capfd, generate(model, "--max-tokens", "-1"), "max_tokens", "-1")
    refused(capfd, generate(model, "--temperature", "-0.5"), "temperature", "-0.5")
    refused(capfd, generate(model, "--dtype", "float8"), "float8", "bfloat16")
    refused(capfd, generate(model, "--device", "cuda"), "cuda")
    refused(capfd, ["no-such-command"], "no-such-command", "generate")


def test_prompts_that_cannot_work(capfd) -> None:  # noqa: ANN001
    refused(capfd, ["generate", "--raw", ""], "empty")
    refused(capfd, ["generate", ""], "empty")
    refused(capfd, ["generate", "--raw", "word " * 9000], "8192")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("generate", "chat", "plan", "bench comm"))


def test_a_closed_reader_is_no_traceback(model: Path) -> None:
    command = f"{sys.executable} -m tokenweave.cli.main --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
