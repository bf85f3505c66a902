"""Checkpoints: exact at the same number of ranks, usable at another, whole or not there."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import FAMILIES, save
from train.checkpoint_ranks import states, train_and_save
from train.train_ranks import Case, losses

from tokenweave.comm import launch
from tokenweave.train.config import TrainingConfig
from tokenweave.train.run import Diverged, latest

BATCH, LENGTH, STEPS = 3, 11, 9
BIASED = next(tiny for tiny in FAMILIES if tiny.name == "llama-bias")  # one KV head: copies on every rank


def case(tmp_path: Path, dtype: str = "float32") -> Case:
    config = TrainingConfig(
        steps=STEPS, batch_size=BATCH, length=LENGTH, learning_rate=1e-3, warmup_steps=2, dtype=dtype
    )  # fmt: skip
    text = np.random.default_rng(3).integers(0, 30, (STEPS * BATCH, LENGTH + 1))
    return Case(save(BIASED, tmp_path), text, config)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The curves of two ranks that nothing stops."""
    cases = {dtype: case(tmp_path_factory.mktemp(dtype), dtype) for dtype in ("float32", "bfloat16")}
    return dict(zip(cases, launch(losses, 2, args=(list(cases.values()),))[0], strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumes_exactly(dtype: str, tmp_path: Path, whole: dict) -> None:
    given, directory = case(tmp_path, dtype), tmp_path / "checkpoints"
    directory.mkdir()
    curve = launch(train_and_save, 2, args=(given, directory, range(4)))[0]
    curve += launch(train_and_save, 2, args=(given, directory, range(4, STEPS)))[0]
    assert curve == whole[dtype]
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000008", "step-00000009"]


def test_resumes_at_other_rank_counts(tmp_path: Path, whole: dict) -> None:
    given, directory = case(tmp_path), tmp_path / "checkpoints"
    directory.mkdir()
    curve = launch(train_and_save, 2, args=(given, directory, range(3)))[0]
    found = latest(directory)
    assert found is not None
    files = {state: load_file(found / state / "model.safetensors") for state in ("weights", "first_moment")}
    files["second_moment"] = load_file(found / "second_moment" / "model.safetensors")
    for rank in launch(states, 3, args=(given, directory)):
        for key, own in rank.items():
            state, name, part = key.split(" ", 2)
            tensor = files[state][name]
            assert tensor.dtype == torch.float32
            if part == "None":
                assert torch.equal(own, tensor)
            else:  # of rows or of columns
                rows = eval(part)  # noqa: S307
                assert any(
                    torch.equal(own, t) for t in (tensor[rows], *([tensor[:, rows]] if tensor.dim() > 1 else []))
                )
    curve += launch(train_and_save, 3, args=(given, directory, range(3, 6)))[0]
    curve += launch(train_and_save, 1, args=(given, directory, range(6, STEPS)))[0]
    assert np.abs(np.array(curve) - np.array(whole["float32"])).max() <= 1e-4


def test_a_full_disk_loses_no_earlier_checkpoint(tmp_path: Path, whole: dict) -> None:
    given, directory = case(tmp_path), tmp_path / "checkpoints"
    directory.mkdir()
    with pytest.raises(OSError, match="No space left"):
        launch(train_and_save, 2, args=(given, directory, range(4), "full disk"))
    found = latest(directory)
    assert found is not None and found.name == "step-00000003"
    assert launch(train_and_save, 2, args=(given, directory, range(3, STEPS)))[0] == whole["float32"][3:]


def test_what_is_not_finite_is_not_written(tmp_path: Path, whole: dict) -> None:
    given, directory = case(tmp_path), tmp_path / "checkpoints"
    directory.mkdir()
    with pytest.raises(Diverged, match="after step 4 there are weights or moments that are not finite"):
        launch(train_and_save, 2, args=(given, directory, range(4), "not finite"))
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000002", "step-00000003"]
    assert launch(train_and_save, 2, args=(given, directory, range(3, STEPS)))[0] == whole["float32"][3:]


def test_a_half_written_checkpoint_is_none(tmp_path: Path, whole: dict) -> None:
    given, directory = case(tmp_path), tmp_path / "checkpoints"
    directory.mkdir()
    launch(train_and_save, 2, args=(given, directory, range(4), "half written"))
    assert (directory / ".unfinished-step-00000099").is_dir()
    assert launch(train_and_save, 2, args=(given, directory, range(3, STEPS)))[0] == whole["float32"][3:]
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000008", "step-00000009"]
