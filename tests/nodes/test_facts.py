"""What must be the same on all nodes, and the message that says what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_distcompat.ext.cluster.facts import differences, facts


def known(**changes: Any) -> dict[str, Any]:
    same: dict[str, Any] = {
        "versions": {"torch": "2.13.0"},
        "sources": {"/r/a.py": "1"},
        "wall": 0.0,
        "shm": 64,
        "gpus": 0,
    }
    return {**same, **changes}


def differences_after(**changes: Any) -> list[str]:
    return list(differences("n2", known(**changes), "n1", known()))


def test_nodes_that_are_alike() -> None:
    assert differences_after() == []


def test_each_difference_names_the_node_and_what_differs() -> None:
    assert differences_after(versions={"torch": "2.12.0"}) == ["n2 has torch 2.12.0, n1 has 2.13.0"]
    assert differences_after(versions={}) == ["n2 has torch not installed, n1 has 2.13.0"]
    assert differences_after(sources={"/r/a.py": "2"}) == ["n2 has another /r/a.py than n1"]
    assert differences_after(sources={"/r/a.py": "1", "/r/b.py": "1"}) == ["/r/b.py is on n2 only"]
    assert differences_after(sources={}) == [
        "n2 has no source of the repository; expected it at the same path as on n1"
    ]
    assert differences_after(wall=3600.0) == ["the clock of n2 is +3600 s off that of n1; expected 5 s at most"]
    assert differences_after(shm=1) == ["n2 has 1 MiB free in /dev/shm; expected 32 at least"]
    assert differences_after(gpus=8) == ["n2 has 8 visible GPUs, n1 has 0"]


def test_facts_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text("x = 1")
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "venv" / "library.py").touch()
    facts_of_node = {**facts(str(tmp_path), [], "cpu"), "wall": 0.0}
    assert list(facts_of_node["sources"]) == [str(tmp_path / "driver.py")]
    assert list(differences("n2", facts_of_node, "n1", {**facts(str(tmp_path), [], "cpu"), "wall": 0.0})) == []
