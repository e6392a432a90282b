"""State of a script beside model and optimizer: variables that the test names, and what accelerate knows of."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_distcompat.ext.scripts import launch
from pytest_distcompat.ext.scripts.launching import Host
from pytest_distcompat.ext.scripts.named_states import NamedStates
from pytest_distcompat.failures import Incompatible, UsageProblem
from pytest_distcompat.trace import ExtraState

from .conftest import PROGRAMS, trip

torch = pytest.importorskip("torch")
LOOP = "averaging_loop.py"
STATES = {"average": ExtraState(alike=False), "length": ExtraState()}


def averaging(host: Host, *more: str, **settings: Any) -> Any:
    """Stop and resume the script."""
    chosen = {"strategy": "ddp", "extra_state": STATES, "same": ["extra_state"], **settings}
    return trip(host, LOOP, *more, launcher="accelerate", **chosen)


def names(states: NamedStates) -> list[str]:
    return [info.name for info in states.read(known=False)]


def test_a_variable_of_the_innermost_function_of_the_script_is_found() -> None:
    average = 3
    (info,) = NamedStates({"average": ExtraState()}).read(known=False)
    assert info.values == {"": "3"}

    def inner(average: int) -> dict[str, str]:
        (states,) = NamedStates({"average": ExtraState()}).read(known=False)
        return dict(states.values)

    assert inner(4) == {"": "4"}
    assert average == 3


def test_a_global_variable_and_an_attribute_are_found() -> None:
    assert names(NamedStates({"LOOP": ExtraState()})) == ["LOOP"]
    trainer = type("Trainer", (), {"ema": 7})
    (info,) = NamedStates({"trainer.ema": ExtraState()}).read(known=False)
    assert info.values == {"": "7"}
    assert trainer


def test_a_name_that_the_script_lacks_is_left_out() -> None:
    # Frames of libraries have variables too: this one is of the module that reads.
    assert names(NamedStates({"missing": ExtraState(), "_LIBRARIES": ExtraState()})) == []


def test_what_a_library_saves_is_read_if_it_can_be_compared() -> None:
    scheduler = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1))
    other = type("Odd", (), {"state_dict": lambda _self: {"odd": object()}})()
    states = NamedStates({})
    states.add([scheduler, scheduler, other])
    assert [info.name for info in states.read(known=True)] == ["AveragedModel[0]"]


@pytest.mark.parametrize("given", [3, [3], ["a b"], {"ema": True}, [""], "ema."])
def test_wrong_names(host: Host, given: Any) -> None:
    with pytest.raises(UsageProblem, match="extra_state="):
        launch(PROGRAMS / LOOP, extra_state=given, host=host)


@pytest.mark.spawn
def test_states_that_come_back(host: Host) -> None:
    run = averaging(host)
    assert {info.name for info in run.resumed.trace.at("load")[0].extra} == {
        "average",
        "length",
        "Average[0]",
    }


@pytest.mark.spawn
@pytest.mark.nightly
def test_an_average_that_is_not_registered(host: Host) -> None:
    expected = r"^ranks 0, 1: average\.state_dict\..* is another after the load than was saved\n"
    with pytest.raises(Incompatible, match=expected):
        averaging(host, "--fault", "not registered")


@pytest.mark.nightly
@pytest.mark.spawn
def test_a_curriculum_that_starts_anew(host: Host) -> None:
    with pytest.raises(Incompatible, match=r"ranks 0, 1: length\.tokens is another after the load"):
        averaging(host, "--fault", "curriculum anew")


@pytest.mark.nightly
@pytest.mark.spawn
def test_a_name_that_no_function_has(host: Host) -> None:
    with pytest.raises(Incompatible, match="extra_state names 'emaa': the script has no such variable"):
        averaging(host, extra_state=["emaa"])


@pytest.mark.nightly
@pytest.mark.spawn
def test_registered_shards_are_those_of_rank_0(host: Host) -> None:
    """docs/upstream/accelerate_registered_shards.py, in a script that names nothing."""
    with pytest.raises(Incompatible, match=r"rank 1: Average\[0\]\..* is another after the load"):
        averaging(host, strategy="fsdp2", extra_state=())
