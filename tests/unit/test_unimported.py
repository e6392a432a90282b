"""Modules that a fork server imported are given back as an import in a fresh process would give them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from pytest_distcompat.launch import unimported

with unimported.recorded("shop"):
    import shop.part
unimported.hide()
assert "shop" not in sys.modules

import shop
assert not hasattr(shop, "part"), "a module that nobody has imported"
print(shop.version)
import shop.part
import shop.version
print(shop.version, shop.part.name, sys.modules["shop.version"].text)
"""


def test_a_package_that_gives_the_name_of_its_module_to_something_else(tmp_path: Path) -> None:
    """Lightning's ``__version__`` is a text, and its module ``__version__`` has that text."""
    package = tmp_path / "shop"
    package.mkdir()
    package.joinpath("__init__.py").write_text("from shop.version import text as version\n", encoding="utf-8")
    package.joinpath("version.py").write_text("text = '2.6'\n", encoding="utf-8")
    package.joinpath("part.py").write_text("name = 'a part'\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, ["2.6", "2.6 a part 2.6"]), done.stderr
