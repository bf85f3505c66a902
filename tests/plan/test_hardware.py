from dataclasses import replace

import pytest

from tokenweave.plan.hardware import catalogue, cpu, hardware


def test_names_of_the_list_and_of_cuda_both_work():
    assert hardware("H100") == hardware("NVIDIA H100 80GB HBM3") == catalogue()["h100"]
    assert all(entry.source for entry in catalogue().values())


def test_unknown_hardware_names_what_is_known():
    with pytest.raises(ValueError, match="h100.*a100"):
        hardware("tpu")


@pytest.mark.parametrize("field", ["peak_flops", "link_latency", "contention", "processors"])
def test_negative_facts_are_refused(field):
    with pytest.raises(ValueError, match=field):
        replace(hardware("h100"), **{field: -1})


def test_a_measured_link_replaces_the_data_sheet():
    linked = hardware("h100").with_link(latency=1e-3, bandwidth=1e9)
    assert (linked.link_latency, linked.link_bandwidth * linked.link_efficiency) == (1e-3, 1e9)


def test_a_rank_needs_a_core():
    assert cpu(1, shared_memory=True).processors == 1
    with pytest.raises(ValueError):
        cpu(0, shared_memory=True)
