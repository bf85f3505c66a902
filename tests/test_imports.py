"""The import rule of the architecture: each package may import only what stands in its row."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "tokenweave"

CORE = ("config", "plan", "comm", "layers", "models", "execute", "engine")
MAY_IMPORT = {
    "config": (),
    "plan": ("config",),
    "comm": ("config",),
    "layers": ("config", "comm"),
    "models": ("config", "comm", "layers"),
    "execute": ("config", "plan", "comm", "layers", "models"),
    "engine": CORE[:-1],
    "train": CORE,
    "serve": CORE,
    "bench": CORE,
    "integrations": CORE,
    "cli": (*CORE, "train", "serve", "bench", "integrations"),
    "__init__": CORE,
    "__main__": ("cli",),
}
WITHOUT = {"config": {"torch"}, "plan": {"torch"}}


def imported_modules(path: Path) -> set[str]:
    """Every module a file imports, wherever in the file the import stands."""
    package = path.relative_to(SOURCE.parent).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: -node.level]) + "." if node.level else ""
            module = (base + (node.module or "")).rstrip(".")
            found.add(module)
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


def own_packages(modules: set[str]) -> set[str]:
    """Packages of tokenweave among the modules."""
    parts = [module.split(".") for module in modules]
    return {p[1] for p in parts if p[0] == "tokenweave" and len(p) > 1}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    package = path.relative_to(SOURCE).with_suffix("").parts[0]
    assert package in MAY_IMPORT, f"{package} is not a package of the architecture"
    modules = imported_modules(path)
    assert "tokenweave" not in modules or package == "__init__", "import the package that is meant"
    foreign = own_packages(modules) - {package} - set(MAY_IMPORT[package])
    foreign = {name for name in foreign if (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").exists()}
    assert not foreign, f"{path.name} of {package} imports {sorted(foreign)}; it may import {MAY_IMPORT[package]}"
    heavy = {module.split(".")[0] for module in modules} & WITHOUT.get(package, set())
    assert not heavy, f"{package} must stay free of {heavy}"


def test_the_rule_sees_local_and_type_checking_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_imports.SOURCE", tmp_path / "tokenweave")
    path = tmp_path / "tokenweave" / "config" / "bad.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tokenweave.engine.llm\n"
        "def f():\n    from tokenweave.cli import main\n    from ..models import decoder\n"
    )
    assert own_packages(imported_modules(path)) == {"engine", "cli", "models"}


def test_the_callers_process_starts_without_torch() -> None:
    """It only starts ranks and handles text; torch would cost it a second."""
    program = "import sys, tokenweave.cli.generate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
