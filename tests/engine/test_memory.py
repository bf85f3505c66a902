from pathlib import Path

import pytest

from tokenweave.config import ModelConfig, shard
from tokenweave.engine.memory import block_bytes, cache_blocks, free_memory

SIZES = {"block_size": 16, "context": 100, "requests": 3}


def test_block_bytes_follow_the_ranks_own_heads() -> None:
    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=64, hidden_size=12, intermediate_size=8, num_hidden_layers=5,
        num_attention_heads=6, num_key_value_heads=3, head_dim=2, max_position_embeddings=32,
    )  # fmt: skip
    per_head = 2 * 5 * 16 * 2 * 4
    assert [block_bytes(config, shard(config, 2, r), 16, 4) for r in range(2)] == [per_head, 2 * per_head]


@pytest.mark.parametrize(
    ("memory", "free", "expected"),
    [(7000, 0, 7), (9999, 0, 9), (10**9, 0, 21), (None, 12_345, 12), (None, 10**9, 21)],
)
def test_as_many_blocks_as_fit_and_no_more_than_can_be_used(memory: int | None, free: int, expected: int) -> None:
    assert cache_blocks(1000, memory, free=free, **SIZES) == expected


@pytest.mark.parametrize(("memory", "free"), [(6999, 10**9), (None, 6999), (1, 0)])
def test_less_than_one_context_is_refused(memory: int | None, free: int) -> None:
    with pytest.raises(ValueError, match="7000 bytes a rank"):
        cache_blocks(1000, memory, free=free, **SIZES)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    return tmp_path


def group(root: Path, path: str, **files: object) -> None:
    directory = root / "sys/fs/cgroup" / path
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (directory / name.replace("__", ".")).write_text(f"{value}\n")


def test_free_memory_without_groups(host: Path) -> None:
    assert free_memory(host) == 8000 * 1024


def test_free_memory_within_version_two_groups(host: Path) -> None:
    (host / "proc/self/cgroup").write_text("0::/outer/inner\n")
    group(host, "", memory__current=1)  # the root group has no limit file
    group(host, "outer/inner", memory__max="max", memory__current=5, memory__stat="inactive_file 3")
    assert free_memory(host) == 8000 * 1024
    group(host, "outer", memory__max=1000, memory__current=900, memory__stat="anon 1\ninactive_file 50")
    assert free_memory(host) == 150


def test_free_memory_in_a_container_that_sees_only_its_own_group(host: Path) -> None:
    (host / "proc/self/cgroup").write_text("0::/docker/abc\n")
    group(host, "", memory__max=500, memory__current=600, memory__stat="inactive_file 0")
    assert free_memory(host) == 0


def test_free_memory_within_a_version_one_group(host: Path) -> None:
    (host / "proc/self/cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n")
    group(host, "memory/job", memory__limit_in_bytes=700, memory__usage_in_bytes=100, memory__stat="inactive_file 0")
    assert free_memory(host) == 600


def test_free_memory_of_this_machine() -> None:
    assert 0 < free_memory() < 1 << 50
