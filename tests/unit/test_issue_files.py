"""Files of known issues come from extensions, by entry points; without one there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_distcompat.known import read, shipped
from pytest_distcompat.known.read import ISSUE_FILES, IssueFile

ISSUE = """
version = 1

[[issue]]
id = "{name}"
link = "https://example.org/{name}"
reason = "wrong"
check = "names"
match = "."
"""


@pytest.fixture(autouse=True)
def anew() -> None:
    shipped.cache_clear()


def test_those_of_the_stack_are_one_file() -> None:
    assert ISSUE_FILES.names() == ("upstream",)
    assert len(shipped()) == len(read.read_file(ISSUE_FILES.get("upstream").path))


def test_files_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {}
    for name in ("first", "second"):
        path = tmp_path / f"{name}.toml"
        path.write_text(ISSUE.format(name=name), encoding="utf-8")
        files[name] = IssueFile(name, path)
    monkeypatch.setitem(vars(ISSUE_FILES), "by_name", files)
    assert [issue.id for issue in shipped()] == ["first", "second"]
    monkeypatch.setitem(vars(ISSUE_FILES), "by_name", {})
    shipped.cache_clear()
    assert shipped() == ()
    shipped.cache_clear()
