"""Directories that transformers loads, from every form a model comes in; nothing changes on the way there and back."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from models.gguf_files import write
from models.test_names import fuse
from safetensors import safe_open
from tiny import FAMILIES, Tiny, build, save

from tokenweave.cli.main import main
from tokenweave.models.convert import convert

IDS = torch.tensor([[3, 141, 59, 26, 5, 358]])


def loaded(path: Path) -> Any:
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def stored(path: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118  not a dict
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("tiny", FAMILIES, ids=lambda tiny: tiny.name)
def test_there_and_back(tiny: Tiny, tmp_path: Path) -> None:
    """transformers -> shards -> convert -> transformers -> convert: every tensor and the logits."""
    model = build(tiny)
    model.save_pretrained(tmp_path / "first", max_shard_size="200KB")
    (tmp_path / "first" / "tokenizer.model").write_bytes(b"as it is")
    convert(tmp_path / "first", tmp_path / "second")
    assert (tmp_path / "second" / "tokenizer.model").read_bytes() == b"as it is"
    assert not list(tmp_path.glob("second/*.index.json"))
    same(stored(tmp_path / "second"), stored(tmp_path / "first"))
    again = loaded(tmp_path / "second")
    same(again.state_dict(), model.state_dict())
    again.save_pretrained(tmp_path / "third")
    convert(tmp_path / "third", tmp_path / "fourth")
    same(stored(tmp_path / "fourth"), stored(tmp_path / "second"))


def test_fused_tensors_are_split(tmp_path: Path) -> None:
    path = save(FAMILIES[0], tmp_path)
    convert(fuse(path, tmp_path / "fused"), tmp_path / "out")
    same(stored(tmp_path / "out"), stored(path))
    loaded(tmp_path / "out")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_a_gguf_file(kind: str, tmp_path: Path) -> None:
    """The command, and the file's values: those of the package's own dequantisation."""
    model = build(Tiny("tiny", "LlamaConfig", dict(intermediate_size=160)))
    quantisation = gguf.GGMLQuantizationType[kind]
    write(tmp_path / "tiny.gguf", model, quantisation)
    assert main(["convert", str(tmp_path / "tiny.gguf"), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    again = loaded(tmp_path / "out")
    name = "model.layers.1.mlp.down_proj.weight"
    values = gguf.dequantize(gguf.quantize(model.state_dict()[name].numpy(), quantisation), quantisation)
    assert torch.equal(again.state_dict()[name], torch.from_numpy(values))
    if kind == "F32":
        assert torch.allclose(again(IDS).logits, model(IDS).logits, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_types(dtype: str, tmp_path: Path) -> None:
    path = save(FAMILIES[0], tmp_path, torch.bfloat16)
    convert(path, tmp_path / "out", dtype)
    assert {str(tensor.dtype) for tensor in stored(tmp_path / "out").values()} == {f"torch.{dtype}"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    convert(path, tmp_path / "auto")
    same(stored(tmp_path / "auto"), stored(path))


def test_a_mixture_of_types_becomes_the_one_that_holds_all(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = save(FAMILIES[0], tmp_path, torch.bfloat16)
    tensors = stored(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 1e-4
    save_file(tensors, path / "model.safetensors")
    convert(path, tmp_path / "out")
    same(stored(tmp_path / "out"), {name: tensor.float() for name, tensor in tensors.items()})


def test_refused_and_nothing_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(FAMILIES[0], tmp_path)
    assert main(["convert", str(path), str(tmp_path)]) == 2
    assert "exists already; name a directory that does not" in capsys.readouterr().err
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-9])
    before = sorted(tmp_path.iterdir())
    for model in (path, tmp_path / "nothing.gguf", tmp_path / "nothing here"):
        assert main(["convert", str(model), str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert sorted(tmp_path.iterdir()) == before
