"""Settings of the heap that training ranks get."""

import pytest

from tokenweave.train.heap import memory_settings


def test_the_callers_settings_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc takes the last of a name."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    (name, ours), *_ = memory_settings("float32").items()
    assert name == "GLIBC_TUNABLES" and "glibc.malloc.tcache_count=0" in ours.split(":")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=7")
    assert memory_settings("float32") == {"GLIBC_TUNABLES": f"{ours}:glibc.malloc.tcache_count=7"}


def test_products_in_bfloat16_are_kept_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    settings = memory_settings("bfloat16")
    assert (settings["LRU_CACHE_CAPACITY"], settings["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) == ("1", "7")
    assert set(memory_settings("float32")) == {"GLIBC_TUNABLES"}
