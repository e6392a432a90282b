"""Warm ranks, and other ranks of ours, are like those of torchrun without this plugin, but for what a table in the docs says."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.plugin.conftest import recorded
from tests.pytest_runs import RECORDED

from pytest_distcompat.launch.process import has_accelerator

pytestmark = pytest.mark.spawn

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Way:
    """How a test is started on ranks."""

    #: The command in front of pytest.
    launch: tuple[str, ...] = ()
    #: Options of pytest, given in the ini file: the fingerprint has the command line.
    options: str = ""


WAYS = {
    "warm": Way(),
    "cold": Way(options="--distcompat-launcher=torchrun"),
    "inside": Way(TORCHRUN),
}
PLAIN = Way(TORCHRUN, "-p no:distcompat")


@pytest.fixture(scope="module")
def fingerprint(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Way], Mapping[str, Any]]:
    """Return the fingerprint of rank 0 of a test that is started that way."""
    # The fixture hides GPUs from all ranks; here only our own way to hide them may count.
    environment = {name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"}

    @functools.cache
    def run(way: Way) -> Mapping[str, Any]:
        directory = tmp_path_factory.mktemp("ranks")
        shutil.copy(Path(__file__).with_name("fingerprint.py"), directory / "test_it.py")
        # pytest-rerunfailures starts a thread in the process that runs pytest.
        ini = f"[pytest]\nmarkers = distcompat\naddopts = -p no:rerunfailures -p no:cacheprovider {way.options}\n"
        (directory / "pytest.ini").write_text(ini, encoding="utf-8")
        result = recorded(directory, [*way.launch, "-m", "pytest", *RECORDED], environment)
        written = directory / "rank-0.json"
        assert written.exists(), result.out
        content: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
        return content

    return run


def differences(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, str]:
    """Return both values of each fact that differs, by its name."""
    differing = {}
    for name, value in expected.items():
        if isinstance(value, dict):
            for key in {*value, *actual[name]}:
                ours, theirs = actual[name].get(key), value.get(key)
                if ours != theirs:
                    differing[f"{name} {key}"] = f"{ours!r}; torchrun's ranks have {theirs!r}"
        elif isinstance(value, list):
            ours, theirs = Counter(map(str, actual[name])), Counter(map(str, value))
            if ours != theirs:
                differing[name] = f"more: {sorted(ours - theirs)}; less: {sorted(theirs - ours)}"
        elif actual[name] != value:
            differing[name] = f"{actual[name]!r}; torchrun's ranks have {value!r}"
    return differing


def documented() -> dict[str, set[str]]:
    """Return the ways in which each fact differs, by the table of the page and the sentence below it."""
    section = PAGE.read_text(encoding="utf-8").partition("## Warm ranks and torchrun's")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| ([a-z, ]+) \| \S.* \|$", section, re.MULTILINE)
    if has_accelerator():
        rows.append(("`environment CUDA_VISIBLE_DEVICES`, `environment DS_ACCELERATOR`", "warm, cold"))
    return {name: set(ways.split(", ")) for names, ways in rows for name in re.findall(r"`([^`]+)`", names)}


@pytest.mark.parametrize(
    "way", ["warm", pytest.param("cold", marks=pytest.mark.nightly), pytest.param("inside", marks=pytest.mark.nightly)]
)
def test_each_difference_from_torchruns_ranks_stands_in_the_docs(
    way: str, fingerprint: Callable[[Way], Mapping[str, Any]]
) -> None:
    differing = differences(fingerprint(WAYS[way]), fingerprint(PLAIN))
    expected = {fact for fact, ways in documented().items() if way in ways}
    assert set(differing) == expected, differing


def test_each_way_of_the_page_is_compared() -> None:
    """A misspelt way in the table would be a row that nothing reads."""
    assert set().union(*documented().values()) == set(WAYS)


def test_a_difference_has_a_name_in_each_kind_of_value() -> None:
    expected = {"one": {"a": 1, "b": 2}, "two": ["x", "y"], "three": "t"}
    facts = {"one": {"a": 1, "b": 3}, "two": ["y", "x", "x"], "three": "u"}
    assert set(differences(facts, expected)) == {"one b", "two", "three"}
    assert not differences(expected, expected)
