"""What a rank's tracer writes, in a process of its own: coverage may trace this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.ext.reach.rank_files import reach_file, reach_files
from pytest_distcompat.ext.reach.tracer import kind_of_action

HERE = Path(__file__).parent

SCRIPT = """
import importlib.util, pathlib, sys
from pytest_distcompat.ext.reach.rank_files import reach_file
from pytest_distcompat.ext.reach import tracer
from pytest_distcompat.ext.reach.libraries import Library

path, out = map(pathlib.Path, sys.argv[1:])
tracer.installed_libraries = lambda: {Library("lib", ("**/library.py",)): path.parent}
spec = importlib.util.spec_from_file_location("library", path)
library = importlib.util.module_from_spec(spec)
spec.loader.exec_module(library)
traced = tracer.RankTracer("torch", "fsdp2-fp32-w2", reach_file(out, 1))
traced.start()
trainer = library.Trainer()
traced.switch("build")
trainer.prepare(None, shard=True)
traced.switch("call step(clip='no')")
trainer.prepare(None, shard=True)
trainer.prepare(None)
traced.switch("")
library.save("")
traced.stop()
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-c", SCRIPT, str(HERE / "library.py"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    file = reach_file(out, 1)
    assert list(out.iterdir()) == [file]
    assert reach_files(out) == [file]
    text = file.read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def arcs(written: dict[str, Any], action: str) -> set[tuple[int, int]]:
    lines = written["actions"][action]["0"]
    return set(zip(lines[::2], lines[1::2], strict=True))


def test_the_file_names_cell_driver_and_files(written: dict[str, Any]) -> None:
    assert (written["driver"], written["cell"]) == ("torch", "fsdp2-fp32-w2")
    assert written["files"] == [["lib", "library.py"]]


def test_each_action_has_all_that_it_executes(written: dict[str, Any]) -> None:
    """Also what an earlier action had executed before, which sys.monitoring reports once alone."""
    lines = (HERE / "library.py").read_text(encoding="utf-8").splitlines()
    shard = [line.strip() for line in lines].index("if shard:") + 1
    taken = (shard, shard + 1)
    not_taken = (shard, shard + 2)
    build = arcs(written, "build")
    assert taken in build
    assert not_taken not in build
    step = arcs(written, "call step")
    assert taken in step
    assert not_taken in step
    end = arcs(written, "end")
    assert not any(shard in arc for arc in end)


def test_calls_are_one_action_whatever_their_arguments() -> None:
    assert kind_of_action("call step(clip='no')") == "call step"
    assert kind_of_action("save") == "save"
