"""Settings of the heap that training ranks get."""

import pytest

from tokenweave.train.heap import heap_settings


def test_the_callers_settings_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc takes the last of a name."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    (name, ours), *_ = heap_settings().items()
    assert name == "GLIBC_TUNABLES" and "glibc.malloc.tcache_count=0" in ours.split(":")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=7")
    assert heap_settings() == {"GLIBC_TUNABLES": f"{ours}:glibc.malloc.tcache_count=7"}
