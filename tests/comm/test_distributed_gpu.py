"""The GPUs' distributed collective, without the GPUs: who gets which rows, on any number of ranks. See `gpu_twin`."""

import functools

import gpu_twin
import pytest

from tokenweave.comm import launch

CHECKS = (
    "fused", "any_cut", "not_finite", "layers", "separate_operations", "gather_and_broadcast", "refused", "two_lanes",
)  # fmt: skip


@functools.cache
def results(size: int) -> list[dict[str, object]]:
    return launch(gpu_twin.all_checks, size, "distributed", threads=1)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", (1, 2, 3))
def test_is_right(size: int, check: str) -> None:
    for rank, found in enumerate(results(size)):
        assert found[check] == [], f"rank {rank}"


@pytest.mark.parametrize("size", (1, 2, 3))
def test_what_is_not_in_the_buffer_is_copied_and_counted(size: int) -> None:
    assert [found["copies"] for found in results(size)] == [[0, 0, 1, 2]] * size
