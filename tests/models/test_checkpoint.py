"""Reading checkpoints: every slice in its place, only its bytes read, and damage named."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, Tiny, build

from tokenweave.config import shard
from tokenweave.config.foreign import read_config
from tokenweave.layers.pieces import Piece
from tokenweave.models.checkpoint import Checkpoint, checked, listed, load
from tokenweave.models.decoder import Decoder

GENERATOR = torch.Generator().manual_seed(0)


def written(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, directory / "model.safetensors")
    return directory


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


@pytest.mark.parametrize("rows", [0, 1, 3, 13, 33, 577])
@pytest.mark.parametrize("dim", [0, 1])
def test_slices(rows: int, dim: int, tmp_path: Path) -> None:
    whole = random(rows, 7) if dim == 0 else random(7, rows)
    checkpoint = Checkpoint(written(tmp_path, {"w": whole}))
    cuts = [0, rows // 3, rows // 2, rows]
    for start, stop in zip(cuts, cuts[1:], strict=False):
        expected = whole[start:stop] if dim == 0 else whole[:, start:stop]
        target = torch.full(expected.shape, -1.0)
        before = checkpoint.bytes_read
        load([Piece("w", tuple(whole.shape), target, dim, slice(start, stop))], checkpoint)
        assert torch.equal(target, expected)
        assert checkpoint.bytes_read - before == expected.numel() * 4


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    whole = random(5, 3).to(stored)
    checkpoint = Checkpoint(written(tmp_path, {"w": whole}))
    target = torch.zeros(2, 3, dtype=wanted)
    load([Piece("w", (5, 3), target, 0, slice(1, 3))], checkpoint)
    assert torch.equal(target, whole[1:3].to(wanted))
    assert checkpoint.dtype("w") == stored and checkpoint.bytes_read == 6 * stored.itemsize


def test_views_of_one_parameter(tmp_path: Path) -> None:
    """The cut of a fused weight: H = 8, 4 query and 2 KV heads of 2, rank 1 of 2."""
    q, k, v = random(8, 8), random(4, 8), random(4, 8)
    checkpoint = Checkpoint(written(tmp_path, {"q": q, "k": k, "v": v}))
    fused = torch.zeros(8, 8)
    load(
        [
            Piece("q", (8, 8), fused[0:4], 0, slice(4, 8)),
            Piece("k", (4, 8), fused[4:6], 0, slice(2, 4)),
            Piece("v", (4, 8), fused[6:8], 0, slice(2, 4)),
        ],
        checkpoint,
    )
    assert torch.equal(fused, torch.cat((q[4:], k[2:], v[2:])))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, torch.Tensor]]]:
    """Every tiny model in shards of at most 50 kB, and its tensors as safetensors' own loader reads them."""
    directory, made = tmp_path_factory.mktemp("sharded"), {}
    for tiny in FAMILIES:
        path = directory / tiny.name
        build(tiny).save_pretrained(path, max_shard_size="50KB")
        files = sorted(path.glob("*.safetensors"))
        assert len(files) > 3
        made[tiny.name] = (path, {k: v for file in files for k, v in load_file(file).items()})
    return made


@pytest.mark.parametrize("tiny", FAMILIES, ids=lambda tiny: tiny.name)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_cover_the_model(tiny: Tiny, size: int, saved: dict[str, Any]) -> None:
    """Every element of every tensor reaches some rank, and each rank has what its slices say."""
    path, tensors = saved[tiny.name]
    config = read_config(path)
    covered = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in tensors.items()}
    for rank in range(size):
        model = Decoder(config, shard(config, size, rank), dtype=torch.float32)
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        checkpoint = Checkpoint(path)
        load(model.pieces(), checkpoint, rank=rank)
        read = 0
        for piece in checked(model.pieces(), checkpoint, rank=rank):
            part = (slice(None),) * piece.dim + (piece.part or slice(None),)
            assert torch.equal(piece.target, tensors[piece.name][part]), piece.name
            covered[piece.name][part] = True
            read += piece.target.numel() * 4
        assert checkpoint.bytes_read == read
        assert not any(parameter.isnan().any() for parameter in model.parameters())
    assert [name for name, seen in covered.items() if not seen.all()] == []


def test_single_file_comes_first(tmp_path: Path) -> None:
    whole = random(3, 3)
    written(tmp_path, {"w": whole})
    (tmp_path / "model.safetensors.index.json").write_text("not read")
    assert Checkpoint(tmp_path).names == ["w"]


def test_memory(tmp_path: Path) -> None:
    """Loading half of 192 MB needs little more than the half itself."""
    weights = {f"w{i}": torch.zeros(4096, 2048).to(torch.bfloat16) for i in range(12)}
    checkpoint = Checkpoint(written(tmp_path, weights))
    del weights
    anonymous, peak, done = _anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], _anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    targets = [torch.empty(4096, 1024, dtype=torch.bfloat16) for _ in range(12)]
    load([Piece(f"w{i}", (4096, 2048), targets[i], 1, slice(1024, 2048)) for i in range(12)], checkpoint)
    done.set()
    watcher.join()
    share = 12 * 4096 * 1024 * 2
    assert peak[0] - anonymous < 1.3 * share


def _anonymous() -> int:
    """Bytes of private and shared anonymous memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def pieces(*names: str) -> list[Piece]:
    return [Piece(name, (3, 2), torch.zeros(3, 2)) for name in names]


def test_names_that_do_not_fit(tmp_path: Path) -> None:
    found = ["model.layers.0.a", "model.layers.1.a", "model.layers.1.b", "x", "lm_head.weight",
             "model.layers.0.self_attn.rotary_emb.inv_freq"]  # fmt: skip
    checkpoint = Checkpoint(written(tmp_path, {name: random(3, 2) for name in found}))
    load(pieces("model.layers.0.a", "model.layers.1.a", "model.layers.1.b", "x"), checkpoint)
    with pytest.raises(ValueError) as caught:
        load(pieces("model.layers.0.a", "y", "model.layers.2.c", "model.layers.0.c"), checkpoint)
    assert str(caught.value) == (
        f"{tmp_path}: the tensors do not fit config.json; missing: model.layers.{{0,2}}.c, y; "
        "left over: model.layers.1.a, model.layers.1.b, x"
    )
    load(pieces("x"), checkpoint, rank=1)  # a rank that has no part of the others
    with pytest.raises(ValueError, match="missing: y$"):
        load(pieces("x", "y"), checkpoint, rank=1)


def test_another_shape(tmp_path: Path) -> None:
    checkpoint = Checkpoint(written(tmp_path, {"x": random(3, 2), "w": random(2, 3)}))
    with pytest.raises(ValueError, match=r"w has shape \[2, 3\], but config.json asks for \[3, 2\]"):
        load(pieces("x", "w"), checkpoint)


def test_another_type(tmp_path: Path) -> None:
    checkpoint = Checkpoint(written(tmp_path, {"w": torch.zeros(3, 2, dtype=torch.int8)}))
    with pytest.raises(ValueError, match="model.safetensors: w has dtype I8, .*supported: F32, BF16, F16"):
        load(pieces("w"), checkpoint)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.999])
def test_truncated(share: float, tmp_path: Path) -> None:
    file = written(tmp_path, {f"w{i}": random(33, 13) for i in range(5)}) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match="model.safetensors is truncated") as caught:
        Checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_corrupt_header(tmp_path: Path) -> None:
    file = written(tmp_path, {"w": random(3, 2)}) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[9] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors is truncated or not a safetensors file"):
        Checkpoint(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="neither model.safetensors nor model.safetensors.index.json"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not an index"), ("[]", "not an index"), ('{"weight_map": 3}', "not an index"),
        (json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}), "b.safetensors is missing"),
        (json.dumps({"weight_map": {"w": "../a.safetensors"}}), "is missing"),
        (json.dumps({"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}), "do not hold: v$"),
    ],
)  # fmt: skip
def test_bad_index(index: str, message: str, tmp_path: Path) -> None:
    save_file({"w": random(3, 2)}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path)


def test_truncated_shard(tmp_path: Path, saved: dict[str, Any]) -> None:
    import shutil

    path = tmp_path / "copy"
    shutil.copytree(saved["llama"][0], path)
    last = sorted(path.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{last.name} is truncated"):
        Checkpoint(path)


def test_listed() -> None:
    assert listed([]) == ""
    assert listed(["b", "a"]) == "a, b"
    assert listed(["m.10.x", "m.9.x", "m.3.y"]) == "m.3.y, m.{9,10}.x"
