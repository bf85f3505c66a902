"""What a run starts from: which models count as another, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
from tiny import FAMILIES, save

from tokenweave.train.start import from_config, from_model

MB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save(FAMILIES[0], tmp_path_factory.mktemp("models"))
    (directory / "tokenizer.json").write_text("{}")
    with open(directory / "model.safetensors", "ab") as file:
        file.write(bytes(3 * MB))  # only the start reads it here
    return directory


def test_a_model_is_the_same_wherever_it_lies(model: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(model, tmp_path / "moved")
    fields = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(dict(reversed(fields.items())), indent=7))
    (moved / "README.md").write_text("nothing that counts")
    assert from_model(moved).digest == from_model(model).digest
    assert from_config(moved / "config.json").digest == from_config(model / "config.json").digest


@pytest.mark.parametrize("place", [4095, MB, 2 * MB + 33])
def test_other_weights_are_another_model(place: int, model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    data = bytearray((other / "model.safetensors").read_bytes())
    data[place] ^= 1
    (other / "model.safetensors").write_bytes(data)
    assert from_model(other).digest != from_model(model).digest


def test_another_config_or_tokenizer_is_another_model(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    (other / "tokenizer.json").write_text('{"version": "1.0"}')
    assert from_model(other).digest != from_model(model).digest
    shutil.copy(model / "tokenizer.json", other)
    fields = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(fields | {"rms_norm_eps": 3e-5}))
    assert from_model(other).digest != from_model(model).digest
    assert from_config(other / "config.json").digest != from_config(model / "config.json").digest


def test_length_and_ranks(model: Path) -> None:
    start = from_model(model)
    context, heads = start.config.max_position_embeddings, start.config.num_attention_heads
    start.check(context, heads)
    with pytest.raises(ValueError, match=f"length {context + 1} is more than .* {context}"):
        start.check(context + 1, 1)
    with pytest.raises(ValueError, match="num_attention_heads"):
        start.check(1, heads + 1)
