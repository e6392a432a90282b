"""Arguments of public methods, from their source alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import pytest

from pytest_distcompat.drivers.accelerate import AccelerateCalls
from pytest_distcompat.drivers.deepspeed import DeepSpeedCalls
from pytest_distcompat.ext.search.arguments import Argument, arguments_of, call_arguments

LIBRARY = '''
raise RuntimeError("imported")


class Engine:
    def save(self, directory, tag=None, latest=True, *, size: "int | str" = "10GB", how: str = "all", level=0.5):
        """Save."""
        if how == "none" or how in ("some", "all"):
            return
        if tag is None or size.endswith("GB"):
            return
        if tag == 3:
            return
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "engine_of_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "main.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("library")
def test_values_are_those_of_the_type_and_of_comparisons() -> None:
    values_by_name = {argument.name: argument.values for argument in arguments_of("engine_of_test.main:Engine.save")}
    assert values_by_name == {
        "tag": (3,),
        "latest": (False,),
        "size": (0, 1, 2, 7, 1_000_003, "GB"),
        "how": ("none", "some"),
        "level": (0.0, 1.0),
    }
    assert "engine_of_test" not in sys.modules


@pytest.mark.usefixtures("library")
def test_a_method_that_is_gone_is_named() -> None:
    with pytest.raises(LookupError, match=r"Engine\.load: no such function"):
        arguments_of("engine_of_test.main:Engine.load")


@pytest.mark.parametrize("calls", [AccelerateCalls, DeepSpeedCalls])
def test_what_a_call_passes_on_exists_in_the_installed_release(calls: type) -> None:
    for name, target in calls.passes_on.items():  # type: ignore[attr-defined]
        pytest.importorskip(target.partition(".")[0])
        assert callable(getattr(calls, name))
        arguments_of(target)


def test_what_a_call_gives_itself_is_not_drawn() -> None:
    pytest.importorskip("deepspeed")
    names = {argument.name for argument in call_arguments(DeepSpeedCalls, "load_weights")}
    assert "load_optimizer_states" in names
    assert "load_module_only" not in names
    assert call_arguments(DeepSpeedCalls, "step") == ()
    assert Argument("keep_vars", (True,)) in call_arguments(DeepSpeedCalls, "module_state_dict")


class Calls:
    passes_on: ClassVar[dict[str, str]] = {"save": "engine_of_test.main:Engine.save"}

    def save(self, how: str = "all") -> None:
        """Save it; the size and the level are left to the search."""
        self.engine.save(how, tag="step")  # type: ignore[attr-defined]  # with latest=True


@pytest.mark.usefixtures("library")
def test_an_argument_that_only_a_comment_names_is_tried() -> None:
    names = [argument.name for argument in call_arguments(Calls, "save")]
    assert names == ["latest", "size", "level"]
