"""What a plan has to know of the machine it is made for: taken at start, by all ranks together."""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from math import inf
from pathlib import Path

import torch

from tokenweave.comm.collective import Collective
from tokenweave.comm.group import Group
from tokenweave.execute.capture import GraphPool
from tokenweave.models.decoder import Decoder
from tokenweave.plan.hardware import Hardware, cpu, hardware
from tokenweave.plan.table import TuneKey, model_dimensions

# The least of so many counts: what else the machine does only adds. Between bursts the ranks sleep a little, so that
# the system puts gloo's threads where they had better be: in one long burst some took 3 times as long to the end.
BURSTS, LATENCY_CALLS, BANDWIDTH_CALLS = 8, 12, 1
BANDWIDTH_BYTES = 1 << 19  # 4 ms a call at 1 Gbit/s
GPU_BANDWIDTH_BYTES = 1 << 25  # 0.15 ms a call over NVLink, ten times what one row takes
GPU_CALLS, GPU_REPLAYS = 16, 5


def tune_key(group: Group, collective: Collective, model: Decoder, *, max_tokens: int) -> TuneKey:
    """What measured costs of this model on these ranks hold for. All ranks call it together; `collective` is idle."""
    latency, bandwidth = link_fingerprint(group, collective, model.config.hidden_size, model.dtype, max_tokens)
    on_gpu = group.device.type == "cuda"
    return TuneKey(
        device=torch.cuda.get_device_name(group.device) if on_gpu else device_name(),
        processors=gpu_processors(group.device) if on_gpu else len(os.sched_getaffinity(0)),
        threads=0 if on_gpu else torch.get_num_threads(),
        hosts=group.hosts,
        model=model_dimensions(model.config),
        tensor_parallel_size=group.size,
        dtype=str(model.dtype).removeprefix("torch."),
        collective=group.collective,
        version=version("tokenweave"),
        link_latency=latency,
        link_bandwidth=bandwidth,
    )


def hardware_here(group: Group) -> Hardware:
    """Facts about this rank's part of the machine."""
    if group.device.type == "cuda":
        name = torch.cuda.get_device_name(group.device)
        try:
            known = hardware(name)
        except ValueError:
            known = replace(hardware("h100"), name=name, processors=gpu_processors(group.device))
        # the link's rate is measured, in bytes that cross it where no switch adds
        return replace(known, multicast=False)
    return cpu(torch.get_num_threads(), shared_memory=group.collective == "shared_memory")


def gpu_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def link_fingerprint(
    group: Group, collective: Collective, hidden_size: int, dtype: torch.dtype, max_tokens: int
) -> tuple[float, float]:
    """Seconds of the fused operation on one row, and bytes/s that cross a rank's link one way on many; zeros if there
    is nobody to talk to. It is the fused operation that a plan weighs.
    """
    if group.size == 1:
        return 0.0, 0.0
    row_bytes = hidden_size * dtype.itemsize
    if group.device.type == "cuda":
        many = min(max_tokens, max(2, GPU_BANDWIDTH_BYTES // row_bytes))
        latency, seconds = (_on_gpu(_operation(collective, group, n, hidden_size, dtype)) for n in (1, many))
    else:
        many = min(max_tokens, max(2, BANDWIDTH_BYTES // row_bytes))
        latency = seconds = inf
        for _ in range(BURSTS):
            time.sleep(0.001)
            latency = min(latency, _least(_operation(collective, group, 1, hidden_size, dtype), LATENCY_CALLS))
            seconds = min(seconds, _least(_operation(collective, group, many, hidden_size, dtype), BANDWIDTH_CALLS))
    crossing = 2 * (group.size - 1) / group.size * many * row_bytes  # partials to their owners, results back
    return latency, crossing / max(seconds - latency, 0.1 * seconds)


def _operation(
    collective: Collective, group: Group, tokens: int, hidden_size: int, dtype: torch.dtype
) -> Callable[[], object]:
    """A fused operation on so many rows."""
    rows = group.rows(tokens)
    partial = collective.buffer(0, tokens).zero_()
    residual = torch.zeros(rows.stop - rows.start, hidden_size, dtype=dtype, device=group.device)
    weight = torch.ones(hidden_size, dtype=dtype, device=group.device)
    return lambda: collective.all_reduce_add_rms_norm(partial, residual, weight, 1e-5)


def _least(call: Callable[[], object], calls: int) -> float:
    """Seconds of the fastest of `calls`; the first, which meets cold memory, does not count."""
    return min(_timed(call) for _ in range(calls + 1))


def _on_gpu(call: Callable[[], object]) -> float:
    """Seconds of a call between others of a graph: what the host takes to launch one differs threefold between
    processes."""
    call()
    graph, _ = GraphPool(torch.device("cuda", torch.cuda.current_device())).capture(
        lambda: [call() for _ in range(GPU_CALLS)]
    )
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken = []
    for _ in range(GPU_REPLAYS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return min(taken) / GPU_CALLS


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def device_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
