"""Where the library of NCCL that ranks load is looked for."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import pytest

from pytest_distcompat.launch import nccl

WHEEL, BUNDLED, PREFIX = "site/nvidia/nccl/lib/libnccl.so.2", "site/torch/lib/libnccl.so.2", "prefix/lib/libnccl.so.2"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with an installed torch, and no library yet."""
    (tmp_path / "site" / "torch").mkdir(parents=True)

    def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
        package = tmp_path.joinpath("site", *name.split("."))
        if not package.is_dir():
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(package)]
        return spec

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], None),
        ([WHEEL, BUNDLED, PREFIX], WHEEL),
        ([BUNDLED, PREFIX], BUNDLED),
        ([PREFIX], PREFIX),
    ],
    ids=["none", "wheel", "bundled", "conda"],
)
def test_the_library_is_where_torch_looks(files: list[str], expected: str | None, site: Path) -> None:
    """One that is not found is taken for one that is too old, and ranks that share a GPU would use gloo."""
    for name in files:
        (site / name).parent.mkdir(parents=True)
        (site / name).touch()
    if expected is None:
        assert nccl.library_path() is None
    else:
        assert nccl.library_path() == site / expected


def test_a_library_that_is_loaded_before_others_comes_first(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / WHEEL).parent.mkdir(parents=True)
    (site / WHEEL).touch()
    monkeypatch.setenv("LD_PRELOAD", "/lib/libjemalloc.so:/new/libnccl.so.2")
    assert nccl.library_path() == Path("/new/libnccl.so.2")
