"""tokenweave train as a user runs it: from scratch, killed at any moment, resumed, at another tp, used by others."""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tokenweave import LLM, SamplingParams
from tokenweave.cli.main import main
from tokenweave.train.run import claimed

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 32,
    "intermediate_size": 70, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
TEXT = (
    "".join(f"The {a} {b} the {c}. " for a in ("cat", "dog", "bird") for b in ("saw", "met") for c in ("fox", "hen"))
    * 9
)
STEPS = 40


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("command")
    (directory / "text.txt").write_text(TEXT)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    assert main(words(directory, "whole")) == 0
    return directory


def words(directory: Path, out: str, *more: str, tp: int = 2) -> list[str]:
    return [
        "train", str(directory / "text.txt"), "--new", str(directory / "config.json"), "--out", str(directory / out),
        "--tp", str(tp), "--steps", str(STEPS), "--batch-size", "4", "--length", "16", "--warmup-steps", "4",
        "--learning-rate", "3e-3", "--evaluate-every", "20", "--checkpoint-every", "3", *more,
    ]  # fmt: skip


def curve(directory: Path, out: str) -> list[float]:
    rows = [json.loads(line) for line in (directory / out / "losses.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row["loss"] for row in rows]


def test_from_scratch_to_a_model_that_others_use(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    import transformers

    losses = curve(files, "whole")
    assert losses[-1] < 0.5 * losses[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(files / "whole" / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(files / "whole" / "model")
    ids = tokenizer("The cat saw", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    with LLM(files / "whole" / "model", tensor_parallel_size=2) as llm:
        found = llm.generate(["The cat saw"], SamplingParams(max_tokens=8, temperature=0.0), progress=False)[0]
    assert found.token_ids == expected
    assert model.dtype == torch.float32
    # a finished run says so, without the memory of no step, and only what is asked for besides is done
    assert main(words(files, "whole", "--plot", str(files / "loss.png"))) == 0
    said = capsys.readouterr()
    assert "the run was finished" in said.out + said.err and "memory" not in said.out + said.err
    assert (files / "loss.png").stat().st_size > 1000


def test_killed_at_any_moment(files: Path) -> None:
    """Killed three times, whatever it does then; the curve is that of the run that was let be."""
    command = [sys.executable, "-m", "tokenweave", *words(files, "killed")]
    log = files / "killed" / "losses.jsonl"
    for wait in (0.0, 0.11, 0.23):
        lines = len(log.read_text().splitlines()) if log.is_file() else 0
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if log.is_file() and len(log.read_text().splitlines()) != lines:
                break
            time.sleep(0.005)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert main(words(files, "killed")) == 0
    assert curve(files, "killed") == curve(files, "whole")
    weights = [(files / out / "model" / "model.safetensors").read_bytes() for out in ("killed", "whole")]
    assert weights[0] == weights[1]


def test_goes_on_at_another_tp(files: Path) -> None:
    command = [sys.executable, "-m", "tokenweave", *words(files, "moved")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoints = files / "moved" / "checkpoints"
    while not (checkpoints / "step-00000006" / "state.json").is_file() and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert main(words(files, "moved", tp=3)) == 0
    differences = [abs(a - b) for a, b in zip(curve(files, "moved"), curve(files, "whole"), strict=True)]
    assert max(differences) <= 1e-4


def test_a_finished_run_is_given_more_steps(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = [*words(files, "more"), "--steps", "12"]  # the last of an option counts
    assert main(first) == 0
    assert main(words(files, "more")) == 0
    assert "had 12 steps and now has 40" in capsys.readouterr().err
    found, whole = curve(files, "more"), curve(files, "whole")
    assert found[:4] == whole[:4]  # the warm-up is the same
    assert found[13:] != whole[13:] and found[-1] < 0.8 * found[11]
    rows = [json.loads(line) for line in (files / "more" / "losses.jsonl").read_text().splitlines()]
    reference = [json.loads(line) for line in (files / "whole" / "losses.jsonl").read_text().splitlines()]
    assert [row["learning_rate"] for row in rows[12:]] == [row["learning_rate"] for row in reference[12:]]
    assert main(first) == 2 and "a run of 40 steps" in capsys.readouterr().err


def test_a_run_that_diverges_ends_at_its_last_checkpoint(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = "diverged"  # good steps while the learning rate rises, one without any, then one of 1e31
    more = ["--steps", "9", "--warmup-steps", "3", "--final-learning-rate", "1e32", "--checkpoint-every", "2"]
    arguments = [*words(files, out), *more]
    kept: list[dict[str, bytes]] = []
    for _ in range(2):  # the same command again ends there too
        assert main(arguments) == 1
        (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tokenweave:")]
        assert (
            said.startswith("tokenweave: error: at step 6 the loss is 5.") and "the norm of its gradient nan: " in said
        )
        assert f"{files / out / 'checkpoints' / 'step-00000004'}, is as it was" in said
        checkpoints = files / out / "checkpoints"
        assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000002", "step-00000004"]
        kept.append({str(path): path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()})
        assert not (files / out / "model" / "model.safetensors").exists()
        losses = [json.loads(line)["loss"] for line in (files / out / "losses.jsonl").read_text().splitlines()]
        assert len(losses) == 5 and all(map(math.isfinite, losses))
    assert kept[0] == kept[1]


def test_a_finished_run_that_is_not_finite_makes_no_model(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*words(files, "spoilt"), "--steps", "2"]
    assert main(arguments) == 0
    model = (files / "spoilt" / "model" / "model.safetensors").read_bytes()
    weights = files / "spoilt" / "checkpoints" / "step-00000002" / "weights" / "model.safetensors"
    save_file({name: tensor * math.nan for name, tensor in load_file(weights).items()}, weights)
    capsys.readouterr()
    assert main(arguments) == 1
    assert "after step 2 the loss on the held-out text is nan" in capsys.readouterr().err
    assert (files / "spoilt" / "model" / "model.safetensors").read_bytes() == model


def test_two_runs_do_not_share_a_place(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with claimed(files / "both"):
        assert main(words(files, "both")) == 2
        assert (
            capsys.readouterr().err
            == f"tokenweave: error: {files / 'both'} is in use by another run; wait for it, or give another --out\n"
        )
        assert (files / "both").is_dir()
    assert not (files / "both").exists()


def test_dropout_of_the_config_is_told(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"attention_dropout": 0.1, "resid_pdrop": 0.25, "embd_pdrop": 0.0, "classifier_dropout": 0.5}
    (files / "dropout.json").write_text(json.dumps(CONFIG | asked))
    arguments = [*words(files, "dropout"), "--new", str(files / "dropout.json"), "--steps", "2"]
    assert main(arguments) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "dropout is not applied" in line]
    assert len(said) == 1 and "attention_dropout 0.1, resid_pdrop 0.25" in said[0] and "0.5" not in said[0]
    assert main([*words(files, "plain"), "--steps", "2"]) == 0 and "dropout" not in capsys.readouterr().err


def test_further_training_of_a_model(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = words(files, "further")
    arguments[2:4] = ["--model", str(files / "whole" / "model")]
    assert main([*arguments, "--dtype", "bfloat16", "--accumulation", "2"]) == 0
    assert main([*arguments, "--dtype", "bfloat16", "--accumulation", "2"]) == 0
    assert curve(files, "further")[0] < 1.2 * curve(files, "whole")[-1]
    other = shutil.copytree(files / "whole" / "model", files / "other")
    save_file({k: 2 * v for k, v in load_file(other / "model.safetensors").items()}, other / "model.safetensors")
    arguments[3] = str(other)
    assert main([*arguments, "--dtype", "bfloat16", "--accumulation", "2"]) == 2
    assert "starts from another" in capsys.readouterr().err
    assert json.loads((files / "further" / "model" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"--learning-rate": "1e-3"}, "learning_rate 0.003, not 0.001"),
        ({"--length": "4096"}, "length"),
        ({"--held-out": "0.2"}, "held_out"),
        ({"--new": "deeper.json"}, "holds a run that starts from another --new or --model"),
    ],
)
def test_a_run_of_other_settings_is_refused(
    changes: dict[str, str], says: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    (files / "deeper.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 3}))
    more = [word for pair in changes.items() for word in pair]
    assert main(words(files, "whole", *more)) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["absent.txt", "--new", "config.json", "--out", "a"], "absent.txt"),
        (["bytes.txt", "--new", "config.json", "--out", "b"], "bytes.txt"),
        (["text.txt", "--new", "absent.json", "--out", "c"], "absent.json"),
        (["text.txt", "--new", "broken.json", "--out", "d"], "vocab_size"),
        (["text.txt", "--new", "small.json", "--out", "e"], "257"),
        (["text.txt", "--model", ".", "--out", "f"], "tokenizer.json"),
        (["text.txt", "--new", "config.json", "--out", "g", "--tp", "5", "--length", "9"], "num_attention_heads"),
        (["text.txt", "--new", "config.json", "--out", "h", "--length", "65"], "max_position_embeddings"),
        (["text.txt", "--new", "config.json", "--out", "i", "--length", "60", "--held-out", "0.99"], "tokens"),
        (["text.txt", "--new", "config.json", "--out", "j", "--steps", "0"], "steps"),
        (["text.txt", "--new", "config.json", "--out", "k", "--plot", "loss.xyz"], "loss.xyz"),
        (["text.txt", "--new", "config.json", "--out", "l", "--tp", "0"], "tensor parallel size"),
        (["text.txt", "--new", "config.json", "--out", "m", "--device", "cuda"], "needs a GPU"),
        (["text.txt", "--new", "config.json", "--out", "n", "--collective", "symmetric"], "symmetric"),
        (["text.txt", "--new", "config.json", "--out", "o", "--learning-rate", "nan"], "learning_rate"),
        (["text.txt", "--new", "config.json", "--out", "p", "--seed", "-1"], "seed must not be negative, got -1"),
        (["text.txt", "--new", "config.json", "--out", "text.txt"], "--out text.txt is to be a directory"),
        (["text.txt", "--new", "config.json", "--out", "text.txt/q"], "and text.txt is a file"),
        (["empty.txt", "empty.txt", "--new", "config.json", "--out", "r"], "empty.txt, empty.txt is empty"),
        (["text.txt", "--model", "weightless", "--out", "s"], "safetensors"),
    ],
)
def test_bad_input(
    arguments: list[str], says: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)
    for module in ("cli.train", "engine.device"):
        monkeypatch.setattr(f"tokenweave.{module}.gpu_count", lambda: 0)
    (files / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    (files / "empty.txt").touch()
    (files / "weightless").mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(files / "whole" / "model" / name, files / "weightless")
    (files / "broken.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "vocab_size"}))
    (files / "small.json").write_text(json.dumps(CONFIG | {"vocab_size": 256}))
    assert main(["train", "--length", "9", *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("tokenweave: error:") and says in said[-1]
    if says != "tokens":  # how many there are is not known before they are made
        out = Path(arguments[arguments.index("--out") + 1])
        assert len(said) == 1 and not out.is_dir()


def test_help_shows_defaults_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for text in ("float32 (default: float32)", "ranks (default: 1)", "tokens (default: on)", "(default: auto)"):
        assert text in said
    assert '"' not in said


def test_a_refused_run_leaves_its_place_free(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "short.txt").write_text("too short")
    refused = words(files, "refused")
    refused[1] = str(files / "short.txt")
    assert main(refused) == 2 and "tokens" in capsys.readouterr().err
    assert main(words(files, "refused")) == 0
    assert curve(files, "refused") == curve(files, "whole")
