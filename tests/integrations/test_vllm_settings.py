"""What turns the plugin on and off, without vLLM."""

import sys
from types import ModuleType

import pytest

from tokenweave.integrations.vllm.settings import MODES, Settings, obstacle, release


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("vllm")
    module.__version__ = "0.32.0+cpu"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


@pytest.mark.parametrize(
    ("value", "mode", "asked"),
    [
        (None, "auto", False), ("", "auto", False), (" AUTO ", "auto", True), ("weave", "weave", True),
        ("0", "off", True), ("off", "off", True), ("False", "off", True), ("nocomm", "nocomm", True),
    ],
)  # fmt: skip
def test_settings(value: str | None, mode: str, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENWEAVE_VLLM", raising=False)
    if value is not None:
        monkeypatch.setenv("TOKENWEAVE_VLLM", value)
    assert Settings.of_environment() == Settings(mode, asked)


@pytest.mark.parametrize("mode", MODES)
def test_on(mode: str, vllm: ModuleType) -> None:
    assert obstacle(Settings(mode, True)) is None


def test_switched_off(vllm: ModuleType) -> None:
    assert obstacle(Settings("off", True)) == "TOKENWEAVE_VLLM says so"


@pytest.mark.parametrize("mode", ["nocomm", "1", "on"])
def test_an_unknown_mode_turns_it_off_and_is_named(mode: str, vllm: ModuleType) -> None:
    assert f"got {mode!r}" in str(obstacle(Settings(mode, True)))


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.32.0", "0.3.2", "dev"])
def test_another_release_turns_it_off(version: str, vllm: ModuleType) -> None:
    vllm.__version__ = version  # type: ignore[attr-defined]
    assert version in str(obstacle(Settings("auto", False)))


@pytest.mark.parametrize(
    ("version", "found"), [("0.32.1.dev3+g12", (0, 32)), ("0.32", (0, 32)), ("0.32rc1", ()), ("", ()), ("dev", ())]
)
def test_release(version: str, found: tuple[int, ...]) -> None:
    assert release(version) == found
