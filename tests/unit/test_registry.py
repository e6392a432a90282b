"""Registries: their items in order, and the message for an unknown name."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.cell import OPTIONS, Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers import DRIVERS, Driver, find_driver
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.models import MODELS
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.registry import Registry, installed_entry_points
from pytest_distcompat.strategies import STRATEGIES

if TYPE_CHECKING:
    from pathlib import Path

REGISTRIES: dict[str, tuple[Registry[Any], tuple[str, ...]]] = {
    "strategy": (STRATEGIES, ("ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")),
    "precision": (PRECISIONS, ("fp32", "bf16_upcast", "bf16_pure")),
    "driver": (DRIVERS, ("torch", "accelerate")),
    "check": (CHECKS, ("active", "names", "optimizer", "dtypes", "resume")),
    "model": (MODELS, ("llama", "llama_tied", "mlp")),
}


@pytest.mark.parametrize("word", REGISTRIES)
def test_items_are_in_order(word: str) -> None:
    registry, known = REGISTRIES[word]
    # Others may be added at any place; these come in this order.
    known_names = tuple(name for name in registry.names() if name in known)
    assert known_names == known
    for name in registry.names():
        assert registry.get(name).name == name


@pytest.mark.parametrize("word", REGISTRIES)
def test_an_unknown_name_lists_the_known_ones(word: str) -> None:
    registry, _ = REGISTRIES[word]
    with pytest.raises(UsageProblem) as caught:
        registry.get("zero9")
    assert str(caught.value) == f"no {word} named 'zero9'. Known: {', '.join(registry.names())}."


def test_without_the_built_in_drivers_there_is_none_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(DRIVERS), "by_name", {})
    with pytest.raises(UsageProblem, match=r"^no driver named 'torch'\. Known: none\.$"):
        find_driver("torch")


def test_the_model_option_takes_the_models_that_there_are() -> None:
    assert OPTIONS["model"].values == MODELS.names()


@pytest.mark.parametrize("name", CHECKS.names())
def test_a_check_documents_what_to_do_if_it_fails(name: str) -> None:
    assert "If it fails:" in CHECKS.get(name).text


class Thing:
    """Item of the registry in the tests below."""

    def __init__(self, name: str, order: int = 0) -> None:
        self.name, self.order = name, order


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """An empty package of a name of its own, importable."""
    folder = tmp_path / re.sub(r"\W", "_", f"registry_of_{request.node.name}")
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    # The modules below find the class there: under importlib mode this file has no name to import.
    monkeypatch.setitem(sys.modules, "the_things", sys.modules[__name__])
    return folder


def test_one_file_adds_one_item(package: Path) -> None:
    (package / "b.py").write_text("from the_things import Thing\nB, C = Thing('b', 1), Thing('c', -1)")
    (package / "a.py").write_text("from the_things import Thing\nA = Thing('a', 1)")
    (package / "_hidden.py").write_text("raise RuntimeError")
    assert Registry(package.name, Thing, "thing").names() == ("c", "a", "b")


def test_classes_count_where_they_are_defined(package: Path) -> None:
    (package / "a.py").write_text("from the_things import Thing\nclass A(Thing):\n    name = 'a'")
    (package / "b.py").write_text(f"from {package.name}.a import A\nclass B(A):\n    name = 'b'")
    assert Registry(package.name, Thing, "thing").names() == ("a", "b")


def test_a_module_that_holds_nothing(package: Path) -> None:
    # The class alone is no thing.
    (package / "empty.py").write_text("from the_things import Thing")
    with pytest.raises(TypeError, match=rf"^{package.name}.empty holds no Thing$"):
        Registry(package.name, Thing, "thing").names()


def test_two_items_of_one_name(package: Path) -> None:
    for name in ("a", "b"):
        (package / f"{name}.py").write_text("from the_things import Thing\nX = Thing('x')")
    with pytest.raises(TypeError, match="holds a second thing named 'x'"):
        Registry(package.name, Thing, "thing").names()


@pytest.fixture
def distribution(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Registry[Thing]]]:
    """The function makes an installed package that adds that entry point to a registry with one item, ``ours``."""
    (package / "own.py").write_text("from the_things import Thing\nX = Thing('ours', 1)")

    def install(value: str) -> Registry[Thing]:
        metadata = package.parent / "my_trainer-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-trainer\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{package.name}]\nhsdp = {value}\n")
        (package.parent / "my_trainer_items.py").write_text(
            "from the_things import Thing\nX, Y = Thing('theirs'), Thing('ours')\n"
        )
        installed_entry_points.cache_clear()
        return Registry(package.name, Thing, "thing")

    yield install
    installed_entry_points.cache_clear()
    sys.modules.pop("my_trainer_items", None)


def test_another_package_adds_an_item(distribution: Callable[[str], Registry[Thing]]) -> None:
    registry = distribution("my_trainer_items:X")
    assert registry.names() == ("theirs", "ours")
    assert list(registry.extensions) == ["hsdp of my-trainer"]
    assert registry.modules[-1] == "my_trainer_items"


def test_an_entry_point_may_name_a_module_of_items(distribution: Callable[[str], Registry[Thing]]) -> None:
    with pytest.raises(UsageProblem, match="holds a second thing named 'ours'"):
        distribution("my_trainer_items").names()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("my_trainer_items:Z", "AttributeError: module 'my_trainer_items' has no attribute 'Z'"),
        ("no_such_module_at_all:X", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("my_trainer_items:__name__", " is 'my_trainer_items'; expected a Thing"),
        ("my_trainer_items:Y", " holds a second thing named 'ours'"),
    ],
)
def test_an_invalid_item_of_another_package(
    value: str, message: str, distribution: Callable[[str], Registry[Thing]]
) -> None:
    with pytest.raises(UsageProblem) as caught:
        distribution(value).names()
    assert str(caught.value).startswith("entry point ")
    assert ": hsdp of my-trainer" in str(caught.value)
    assert str(caught.value).endswith(message)


#: How the message ends about a name that no driver can have.
EXPECTED_NAME = f": expected module:attribute, or one of {', '.join(DRIVERS.names())}"


class MyDriver(Driver):
    """An adopter's own."""


def test_an_adopters_own_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_trainer", sys.modules[__name__])
    assert find_driver("my_trainer:MyDriver") is MyDriver
    assert find_driver("torch") is DRIVERS.get("torch")
    cell = Cell.of("ddp", "fp32", model="mlp")
    assert MyDriver.unsupported_reason(cell) == "the MyDriver driver does not support option 'model'"
    assert MyDriver.unsupported_reason(Cell("ddp", "fp32")) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_trainer:Thing", "; expected a subclass of pytest_distcompat.Driver"),
        ("my_trainer:pytest", "; expected a subclass of pytest_distcompat.Driver"),
        ("my_trainer:Nothing", "has no attribute 'Nothing'"),
        ("", EXPECTED_NAME),
        (":", EXPECTED_NAME),
        (":Driver", EXPECTED_NAME),
        ("my_trainer:", EXPECTED_NAME),
        (".my_trainer:MyDriver", EXPECTED_NAME),
        (
            "no_such_module_at_all:Driver",
            "No module named 'no_such_module_at_all'; install it, or have pytest find it: pythonpath = DIRECTORY in its settings",
        ),
    ],
)
def test_an_object_that_is_no_driver(monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.setitem(sys.modules, "my_trainer", sys.modules[__name__])
    with pytest.raises(UsageProblem) as caught:
        find_driver(name)
    assert str(caught.value).startswith(f"driver {name!r}")
    assert str(caught.value).endswith(message)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = (", "SyntaxError when it is imported: '(' was never closed (leaves.py, line 1)"),
        ("import sys; sys.exit(0)", "leaves exits when it is imported, with 0"),
        ("raise ValueError('no key')", "ValueError when it is imported: no key"),
        ("import pytest; pytest.skip('no GPU', allow_module_level=True)", "Skipped when it is imported: no GPU"),
        ("import no_such_module_at_all", "No module named 'no_such_module_at_all'"),
    ],
)
def test_a_module_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    """Whatever the module raises: an exit with 0 ended the session, and nothing had run."""
    (tmp_path / "leaves.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageProblem) as caught:
        find_driver("leaves:Driver")
    assert str(caught.value) == f"driver 'leaves:Driver': {reason}"


@pytest.mark.parametrize(
    ("attribute", "value", "expected"),
    [
        ("options", "compile", "options is 'compile'; expected a tuple of names"),
        ("options", property(lambda self: ()), "options is a property; expected a tuple of names, which is read on"),
        ("reshards", property(lambda self: ()), "reshards is a property; expected a tuple of names, which is read on"),
        ("libraries", "torch", "libraries is 'torch'; expected a tuple of names"),
        ("blocks", ("Linear", 3), "blocks is ('Linear', 3); expected a tuple of names"),
        ("reshards", True, "reshards is True; expected a tuple of names"),
        ("portable", ("ddp", "fsdp2"), "portable is ('ddp', 'fsdp2'); expected a mapping of strategy to strategy"),
        ("options", ("compil",), "options: no option named 'compil'. Known: model, "),
        ("reshards", ("fspd2",), "reshards: no strategy named 'fspd2'. Known: ddp, "),
        ("portable", {"ddp": "fspd2"}, "portable: no strategy named 'fspd2'. Known: ddp, "),
        (
            "unsupported_reason",
            lambda self, cell, device="cpu": "",
            "unsupported_reason is no classmethod; expected unsupported_reason(cls, cell, device)",
        ),
    ],
)
def test_a_driver_with_wrong_attributes(
    monkeypatch: pytest.MonkeyPatch, attribute: str, value: object, expected: str
) -> None:
    """A text would be taken for its letters, a misspelt name for a claim of nothing: items would be missing unseen."""
    monkeypatch.setitem(sys.modules, "my_trainer", sys.modules[__name__])
    monkeypatch.setattr(MyDriver, attribute, value)
    with pytest.raises(UsageProblem) as caught:
        find_driver("my_trainer:MyDriver")
    assert str(caught.value).startswith(f"driver 'my_trainer:MyDriver': {expected}")
