"""Wheels that tests of other releases install."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

Wheel = Callable[..., None]


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """Makes wheels that pip finds, and nothing else."""
    registry = tmp_path / "wheels"
    registry.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(registry))

    def make(name: str, version: str, *requires: str) -> None:
        message = f"{name}-{version}.dist-info"
        needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
        files = {
            f"{name}.py": f"__version__ = {version!r}\n",
            f"{message}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
            f"{message}/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        files[f"{message}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{message}/RECORD"))
        with zipfile.ZipFile(registry / f"{name}-{version}-py3-none-any.whl", "w") as archive:
            for path, text in files.items():
                archive.writestr(path, text)

    return make
