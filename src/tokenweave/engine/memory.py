"""How large the paged cache is."""

import math
from pathlib import Path

import torch

from tokenweave.config import ModelConfig, Shard

GIB = 1 << 30
SHARE, LIMIT = 0.3, 4 * GIB  # of the host's free memory, for all ranks together; for one rank, whatever is free
# Of a GPU's free memory once the weights are there. Of the rest, two lanes of a step of 32768 tokens and hidden size
# 8192 take 10 GB: communication buffers, residual and what a layer computes.
GPU_SHARE = 0.6


def block_bytes(config: ModelConfig, shard: Shard, block_size: int, itemsize: int) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in every layer, of this rank's heads."""
    return 2 * config.num_hidden_layers * block_size * shard.num_kv_heads * config.head_dim * itemsize


def cache_blocks(per_block: int, memory: int | None, *, block_size: int, context: int, requests: int, free: int) -> int:
    """How many blocks of `per_block` bytes a rank's cache has: as many as `memory` bytes hold, or `free` where that is
    None, and no more than `requests` whole contexts need.

    Raises ValueError unless one whole context fits: a request could otherwise stand still for ever.
    """
    whole = math.ceil(context / block_size)
    count = min((free if memory is None else memory) // per_block, whole * requests)
    if count < whole:
        source = f"free memory leaves {free} for it" if memory is None else f"kv_cache_memory is {memory}"
        raise ValueError(
            f"the cache cannot hold one request of {context} tokens: that takes {whole * per_block} bytes a rank, and "
            f"{source}; raise kv_cache_memory or lower max_model_len"
        )
    return count


def default_memory(size: int) -> int:
    """Bytes that one of `size` ranks may use for its cache. They are touched only as the cache fills."""
    return min(LIMIT, int(SHARE * free_memory()) // size)


def default_gpu_memory(size: int, device: torch.device) -> int:
    """Bytes that one of `size` ranks may use for its cache on its GPU, which it may share with others."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(GPU_SHARE * free) // -(-size // torch.cuda.device_count())


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that can be had without swapping: what /proc/meminfo calls available, or less where this process's control
    group, or one above it, is limited to less."""
    fields = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, used, statistics in _control_groups(root):
        try:
            room = int(limit.read_text()) - int(used.read_text())
            counts = dict(line.split() for line in statistics.read_text().splitlines())
            free = min(free, room + int(counts.get("inactive_file", 0)))  # the kernel takes those pages back
        except (OSError, ValueError):  # not there, or "max": no limit
            continue
    return max(free, 0)


def _control_groups(root: Path) -> list[tuple[Path, Path, Path]]:
    """Files with limit, use and statistics of this process's memory control groups, either version, and those above."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # inside a container the path is often the host's, and the container's own group is mounted at the base
        own = Path(path.lstrip("/"))
        levels = {base, *(base / part for part in (own, *own.parents))}
        found += [(level / limit, level / used, level / "memory.stat") for level in levels]
    return found
