"""What a plan has to know of the machine, taken by real ranks."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from execute.stage_ranks import HIDDEN, model_of

from tokenweave.comm import Group, launch
from tokenweave.comm.emulated import Emulation, emulated_group
from tokenweave.config import ModelConfig
from tokenweave.execute import machine
from tokenweave.plan.table import TuneKey

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=97, hidden_size=HIDDEN, intermediate_size=70, num_hidden_layers=3,
    num_attention_heads=6, num_key_value_heads=3, head_dim=4, max_position_embeddings=128,
)  # fmt: skip


def take(group: Group, max_tokens: int) -> tuple[TuneKey, bool, float]:
    """The key, whether the machine hides communication, and the sum of a reduction made afterwards."""
    model = model_of([], group.rank, group.size)
    model.config = CONFIG
    with group.open_collective(HIDDEN, max_tokens, torch.float32) as collective:
        key = machine.tune_key(group, collective, model, max_tokens=max_tokens)  # type: ignore[arg-type]
        total = collective.all_reduce(torch.ones(max_tokens, HIDDEN)).sum().item()
    return key, machine.hardware_here(group).contention < 1, total


@pytest.mark.parametrize("collective", ["shared_memory", "distributed"])
@pytest.mark.parametrize(("size", "max_tokens"), [(1, 8), (2, 1), (2, 300), (3, 33)])
def test_key(collective: str, size: int, max_tokens: int) -> None:
    found = launch(take, size, collective, args=(max_tokens,), threads=1)
    keys = [key for key, _, _ in found]
    for key in keys:
        assert (key.tensor_parallel_size, key.collective, key.dtype, key.threads) == (size, collective, "float32", 1)
        assert (
            key.hosts == 1 and key.processors >= 1 and key.model == (3, HIDDEN, 70, 6, 3, 4, 97, True, False, *(0,) * 6)
        )
        assert TuneKey(**json.loads(json.dumps(asdict(key))) | {"model": key.model}) == key
        if size == 1:
            assert (key.link_latency, key.link_bandwidth) == (0.0, 0.0) and key.mismatch(key) is None
        else:
            assert 1e-7 < key.link_latency < 1 and 1e3 < key.link_bandwidth < 1e13
    assert all(hides == (collective == "distributed") for _, hides, _ in found)
    assert all(total == size * max_tokens * HIDDEN for _, _, total in found)  # the lanes are as they were


def test_device_name(tmp_path: Path) -> None:
    facts = tmp_path / "cpuinfo"
    facts.write_text("processor\t: 0\nmodel name\t: Some CPU: 3 GHz\nmodel name\t: other\n")
    assert machine.device_name(facts) == "Some CPU: 3 GHz"
    facts.write_text("processor\t: 0\n")
    assert machine.device_name(facts) == machine.device_name(tmp_path / "none") != ""


def on_three_hosts(group: Group) -> int:
    group.hosts = 3
    return take(group, 8)[0].hosts


def test_hosts_are_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of a launcher that has started the caller alone."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert [key.hosts for key, _, _ in launch(take, 2, "distributed", args=(8,), threads=1)] == [1, 1]
    assert launch(on_three_hosts, 2, "distributed", threads=1) == [3, 3]


@pytest.mark.gpu
def test_a_link_of_gpus_is_timed_alike_whatever_the_host_does() -> None:
    """The operation's own time: that of the emulation, 20 µs and 1 µs a row, and no more than a tenth besides."""
    emulation = Emulation(
        size=8, traffic="multicast", fused={16: lambda n: 2e-5 + 1e-6 * n}, all_reduce=float, reduce_scatter=float,
        all_gather=float,
    )  # fmt: skip
    with emulated_group(emulation) as group, group.open_collective(8192, 2048, torch.bfloat16) as collective:
        for _ in range(2):
            latency, bandwidth = machine.link_fingerprint(group, collective, 8192, torch.bfloat16, 2048)
            assert latency == pytest.approx(21e-6, rel=0.15)
            assert bandwidth == pytest.approx(2 * 7 / 8 * 2048 * 16384 / 2047e-6, rel=0.1)
