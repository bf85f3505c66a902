import json
import subprocess
import sys

import pytest

from tokenweave.bench.dimensions import DIMENSIONS
from tokenweave.cli.main import main
from tokenweave.plan.hardware import catalogue

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 100000, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("name", list(catalogue()))
def test_plans_for_all_known_hardware(model, capsys, name):
    for place in (model, model / "config.json"):
        assert main(["plan", str(place), "--hardware", name, "--tp", "2", "--tokens", "1,13,1024"]) == 0
        shown = capsys.readouterr()
        assert f"2 x {name}" in shown.out and "1024" in shown.out and not shown.err


@pytest.mark.parametrize("name", list(DIMENSIONS))
def test_plans_for_models_known_by_name(capsys, name):
    assert main(["plan", name, "--tp", "8", "--tokens", "1024"]) == 0
    assert "1024" in capsys.readouterr().out


def test_files_are_written(model, capsys):
    pytest.importorskip("matplotlib")
    files = {kind: model / f"plan.{kind}" for kind in ("json", "png", "svg")}
    for picture in ("png", "svg"):
        words = ["plan", str(model), "--tp", "3", "--tokens", "64,32768", "--compare", "pipeline"]
        assert main([*words, "--json", str(files["json"]), "--plot", str(files[picture])]) == 0
    found = json.loads(files["json"].read_text())
    assert [step["tokens"] for step in found["steps"]] == [64, 32768] and len(found["pipeline"]) == 2
    assert files["png"].read_bytes().startswith(b"\x89PNG") and b"<svg" in files["svg"].read_bytes()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tokens", "1,two"], "whole numbers"),
        (["--tokens", "0"], "at least 1"),
        (["--tokens", ""], "whole numbers"),
        (["--tp", "10"], "num_attention_heads (9)"),
        (["--tp", "0"], "at least 1"),
        (["--context", "-1"], "not be negative"),
        (["--plot", "plan.gif"], ".png or .svg"),
    ],
)
def test_bad_input_is_one_line_and_2(model, capsys, words, says):
    assert main(["plan", str(model), *words]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "readable JSON"),
        ("[]", "JSON object"),
        ("{}", "architectures"),
        (json.dumps(CONFIG | {"architectures": ["NobodysForCausalLM"]}), "LlamaForCausalLM"),
        (json.dumps(CONFIG | {"hidden_size": 0}), "hidden_size"),
    ],
)
def test_bad_configs_are_one_line_that_names_the_file(model, capsys, content, says):
    (model / "config.json").write_text(content)
    for place in (model, model / "config.json"):
        assert main(["plan", str(place)]) == 2
        error = capsys.readouterr().err
        assert says in error and "config.json" in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["no/such/model", "no-such/model", ""])
def test_no_such_model(capsys, name, tmp_path):
    assert main(["plan", name or str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and (name or "config.json") in error


def test_it_starts_without_torch():
    """A plan is an answer in a second, on a machine that need not have torch loaded."""
    check = "import sys, tokenweave.cli.plan; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
