import re
from pathlib import Path

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "known-failures.md"


def test_every_test_named_in_the_document_exists() -> None:
    named = re.findall(r"`tests/(\S+\.py)::(\w+)`", DOCUMENT.read_text(encoding="utf-8"))
    assert len(named) >= 15
    absent = [
        f"{file}::{name}" for file, name in named if not re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.M)
    ]
    assert absent == []
