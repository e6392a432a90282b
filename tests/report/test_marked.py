"""Marked tests are in no matrix; their items have properties too."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Session

MARKED = """
import pytest

@pytest.mark.distcompat(strategies=["fsdp2"], precisions=["fp32"])
def test_cells(cell): pass

@pytest.mark.distcompat
def test_unmarked(): pass

def test_ordinary(): pass
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_junit_of_a_marked_test(session: Session, tmp_path: Path, workers: tuple[str, ...]) -> None:
    (tmp_path / "test_marked.py").write_text(MARKED, encoding="utf-8")
    session("test_marked.py", "--junitxml=junit.xml", *workers)
    properties = {}
    for case in ET.parse(tmp_path / "junit.xml").iter("testcase"):
        properties[case.get("name", "")] = {prop.get("name"): prop.get("value") for prop in case.iter("property")}
    assert properties["test_cells[fsdp2-fp32-w2]"]["distcompat_cell"] == "fsdp2-fp32-w2"
    assert "torch " in str(properties["test_cells[fsdp2-fp32-w2]"]["distcompat_versions"])
    assert "distcompat_cell" not in properties["test_unmarked"]
    assert "torch " in str(properties["test_unmarked"]["distcompat_versions"])
    assert properties["test_ordinary"] == {}
