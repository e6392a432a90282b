"""Modules that ask, while they are imported, which rank they are on."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path

import pytest

from pytest_distcompat.launch import per_rank
from pytest_distcompat.launch.per_rank import asked_at_import


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def told(here: Path, text: str) -> list[str]:
    (here / "trainer.py").write_text(text, encoding="utf-8")
    importlib.invalidate_caches()
    sys.modules.pop("trainer", None)
    with asked_at_import() as found, contextlib.suppress(LookupError):
        importlib.import_module("trainer")
    return found


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("os.environ.get('RANK', 0)", "RANK"),
        ("os.getenv('LOCAL_RANK')", "LOCAL_RANK"),
        ("'RANK' in os.environ", "RANK"),
        ("os.environ['WORLD_SIZE']", "WORLD_SIZE"),
        ("os.environ['LOCAL_WORLD_SIZE']", "LOCAL_WORLD_SIZE"),
        ("max(int(os.environ.get(name, -1)) for name in ['RANK'])", "RANK"),
        ("(lambda: os.environ.get('RANK'))()", "RANK"),
    ],
)
def test_each_way_to_ask_is_seen(here: Path, line: str, name: str) -> None:
    place = f"{here / 'trainer.py'}:2"
    assert told(here, f"import os\nANSWER = {line}\n") == [
        f"{place} asks for {name} when it is imported, which only ranks know"
    ]


@pytest.mark.parametrize(
    "line",
    [
        "def rank(): return os.environ['RANK']",
        "os.environ.setdefault('RANK', '0')",
        "os.environ['RANK'] = '0'",
        "os.environ.get('MASTER_PORT'), os.environ.get('RANK_OF_MINE')",
        "dict(os.environ)",
    ],
)
def test_what_does_not_ask_for_it(here: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    assert told(here, f"import os\n{line}\n") == []


def test_an_installed_library_may_ask_and_who_asks_it_at_import_may_not(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "site").mkdir()
    monkeypatch.syspath_prepend(here / "site")
    (here / "site" / "library.py").write_text(
        "import os\nRANK = os.environ.get('RANK')\ndef rank():\n    return os.environ.get('RANK')\n", encoding="utf-8"
    )
    monkeypatch.setattr(per_rank, "_INSTALLED", (f"{here / 'site'}{os.sep}",))
    assert told(here, "import library\n") == []
    (found,) = told(here, "import library\n\nRANK = library.rank()\n")
    assert found.startswith(f"{here / 'trainer.py'}:3 asks for RANK ")


def test_what_is_installed_is_not_taken_for_somebodys_own() -> None:
    assert str(Path(pytest.__file__).resolve()).startswith(per_rank._INSTALLED)
    assert str(Path(importlib.__file__).resolve()).startswith(per_rank._INSTALLED)
    assert not str(Path(__file__).resolve()).startswith(per_rank._INSTALLED)


def test_the_environment_is_as_it_was(here: Path) -> None:
    ordinary = type(os.environ)
    (found,) = told(here, "import os\nRANK = os.environ['RANK']\n")  # raises
    assert "asks for RANK" in found
    assert type(os.environ) is ordinary
    with asked_at_import() as found_later:
        assert os.environ.get("RANK") is None  # no import
        assert os.environ.copy()["WORLD_SIZE"] == "4"
    assert found_later == []
