"""Walks: which calls are drawn in which order, what is made of a failure, and the script that shows it."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_distcompat.calls import Call, offered, read_calls, refused
from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import DRIVERS, find_driver
from pytest_distcompat.ext.walk.explore import CORPUS, WALKS, Explorer
from pytest_distcompat.ext.walk.script import script
from pytest_distcompat.ext.walk.sequence import Walk, valid
from pytest_distcompat.known import shipped
from pytest_distcompat.live_calls import Calls
from pytest_distcompat.runner import Runner

CELL = Cell.parse("fsdp2-fp32-w2-model_mlp")
DECLARED = [name for name in DRIVERS.names() if find_driver(name).live_calls is not None]


def calls(text: str) -> list[Call]:
    return [Call.parse(f"{part})".lstrip(", ")) for part in text.split(")")[:-1]]


def test_a_call_is_written_as_python_writes_it_and_read_back() -> None:
    call = Call("step", (("clip", "no"), ("zero", "keep")))
    assert str(call) == "step(clip='no', zero='keep')"
    assert Call.parse(str(call)) == call


@pytest.mark.parametrize("text", ["", "step", "step(", "a.b()", "1 + 1", "step('no')"])
def test_a_text_that_is_no_call_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no call; one reads like step"):
        Call.parse(text)


def test_an_argument_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="names 'clip' twice"):
        Call.parse("step(clip='no', clip='value')")


def test_calls_are_read_as_they_are_offered() -> None:
    calls = read_calls("micro(), step(zero='none', clip='no'), step(zero='keep', clip='value')", Calls)
    assert list(map(str, calls)) == ["micro()", "step(clip='no')", "step(clip='value', zero='keep')"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step() micro()", "is no list of calls; one reads like step"),
        ("step", "is no call; one reads like step"),
        ("step(), stepp()", r"stepp\(\): no such call. Known: add_group, "),
        ("step(clip=3)", r"step\(clip=3\): no such arguments. Known: step\(\), step\(zero='zeros'\), "),
        ("skip(many=True)", r"skip\(many=True\): no such arguments. Known: skip\(\)$"),
    ],
)
def test_a_call_that_is_not_offered_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_calls(text, Calls)


def test_values_of_arguments_come_from_annotations_and_defaults_are_omitted() -> None:
    texts = list(map(str, offered(Calls)))
    assert texts.index("step()") < texts.index("step(clip='no', zero='keep')")
    assert {"zero_grad()", "zero_grad(set_to_none=False)", "freeze(part='blocks.1')"} < set(texts)
    assert "step(clip='norm')" not in texts


@pytest.mark.parametrize("driver", DECLARED)
def test_every_refusal_is_of_a_declared_call_and_says_why(driver: str) -> None:
    kind = find_driver(driver).live_calls
    texts = list(map(str, offered(kind)))
    for strategy in (name for name in kind.refused if name != "*"):
        reasons = refused(kind, strategy)
        for reason in reasons.values():
            assert len(reason) > 10
        assert len(reasons) < len(texts)


@pytest.mark.parametrize(
    ("walk", "expected"),
    [
        ("step(), save(), load(), load_weights()", True),
        ("load()", False),
        ("micro(), save()", False),
        ("step(zero='keep'), freeze()", False),
        ("step(zero='keep'), zero_grad(), freeze(), unfreeze()", True),
        ("freeze(), freeze(part='blocks.1')", False),
        ("freeze(), unfreeze(part='blocks.1')", False),
        ("save(), freeze(), load()", False),
        ("add_group(), add_group()", False),
        ("add_group(), resume()", False),
        ("save(), resume(), load()", False),
        ("accessors(of='optimizer_state')", False),
        ("step(), accessors(of='optimizer_state')", True),
    ],
)
def test_calls_follow_one_another_as_a_user_may_call_them(walk: str, expected: bool) -> None:
    assert valid(calls(walk)) is expected


def test_a_trainer_that_saves_itself_saves_after_a_step_only() -> None:
    assert not valid(calls("save()"), own=("step", "save"))
    assert valid(calls("step(), save()"), own=("step", "save"))
    assert not valid(calls("step(), save(), save()"), own=("step", "save"))


def test_a_walk_has_a_run_for_each_process_group_and_one_reference() -> None:
    walk = Walk(tuple(calls("step(), skip(), resume(), step(clip='no')")), find_driver("torch").live_calls)
    first, second, reference = walk.scenario().runs
    assert first.actions == ("build_model", "build", "call step()", "call skip()", "save")
    assert second.actions == ("build_model", "build", "load", "call step(clip='no')")
    assert second.after == first.name
    assert second.first_step == 2
    assert reference.actions[1:] == tuple(f"reference {call}" for call in walk.calls)
    assert reference.strategy == "ddp"
    assert reference.world_size == 1


def test_a_trainer_does_its_own_steps_and_saves_as_actions_of_its_plan() -> None:
    walk = Walk(tuple(calls("step(), evaluate(), save()")), find_driver("trainer").live_calls)
    assert walk.scenario().runs[0].actions == ("build_model", "build", "step", "call evaluate()", "save")


class Imagined(Explorer):
    """Its walks fail where the calls of ``wrong`` come in that order."""

    wrong: tuple[str, ...] = ()
    ran = 0

    def check(self, drawn: list[Call] | tuple[Call, ...]) -> tuple[Call, ...]:  # type: ignore[override]  # nothing runs
        self.ran += 1
        rest = list(self.wrong)
        for index, call in enumerate(drawn):
            if rest and str(call) == rest[0]:
                rest.pop(0)
            if not rest:
                self.failed[tuple(drawn[: index + 1])] = ["wrong"]
                return tuple(drawn[: index + 1])
        return ()


def imagined(*wrong: str) -> Imagined:
    explorer = Imagined(cast("Runner", None), "torch", CELL)
    explorer.wrong = wrong
    return explorer


@pytest.mark.parametrize("wrong", [("evaluate()",), ("step(clip='value')", "skip()"), ("save()", "load()")])
def test_what_fails_is_found_and_shrunk_to_the_calls_that_it_takes(wrong: tuple[str, ...]) -> None:
    calls = imagined(*wrong).draw(examples=300, seed=7)
    needed = ("step()", "save()", "load()") if wrong[0] == "save()" else wrong
    for call in calls:
        assert str(call) in needed


@pytest.mark.parametrize("seed", range(5))
def test_the_walks_of_a_session_step_after_a_micro_batch_though_most_calls_are_observers(seed: int) -> None:
    explorer = Imagined(cast("Runner", None), "deepspeed", Cell.of("zero2", "fp32", model="mlp"))
    explorer.wrong = ("micro()", "step()")
    assert [str(call) for call in explorer.draw(WALKS, seed)] == ["micro()", "step()"]


def test_nothing_is_found_where_nothing_fails_and_a_seed_draws_the_same() -> None:
    assert imagined("no such call()").draw(examples=30, seed=1) == ()
    assert imagined("skip()").draw(examples=50, seed=3) == imagined("skip()").draw(examples=50, seed=3)


def test_walks_of_the_corpus_are_replayed_first_and_what_they_show_is_not_drawn() -> None:
    explorer = imagined("micro()", "zero_grad()", "step()")
    trace = explorer.explore(examples=40, seed=1)
    assert not trace.runs
    shown = [", ".join(map(str, calls)) for calls in explorer.failed]
    assert shown == ["micro(), zero_grad(), step()"]


def test_every_walk_of_the_corpus_is_one_that_could_be_drawn_and_names_a_known_issue() -> None:
    issues = {issue.id for issue in shipped()}
    for entry in json.loads(CORPUS.read_text(encoding="utf-8")):
        kind = find_driver(entry["driver"]).live_calls
        walk = [Call.parse(text) for text in entry["calls"]]
        assert valid(walk, kind.own)
        assert entry["issue"] in issues
        for strategy in entry["strategies"]:
            assert not {*walk} & {*refused(kind, strategy)}


@pytest.mark.parametrize("driver", ["torch", "accelerate", "deepspeed"])
def test_the_script_has_the_calls_their_methods_and_no_import_of_this_plugin(driver: str, tmp_path: Path) -> None:
    kind = find_driver(driver).live_calls
    for strategy in kind.script:
        walk = Walk(tuple(calls("step(), save(), skip(), evaluate()")), kind)
        text = script(Cell.of(strategy, "fp32", model="mlp"), walk, "the finding")
        assert text is not None
        ast.parse(text)
        assert "pytest_distcompat" not in text
        # The script has no driver: it sets all attributes of one that its methods use.
        for attribute in re.findall(r"self\.trainer\.(\w+)", text):
            assert re.search(rf"\b{attribute}\b[\w., ]*=", text), attribute
        assert "def skip(self)" in text
        assert "def freeze(self" not in text
        assert "the finding" in text


def test_a_trainer_whose_calls_are_callbacks_has_no_script() -> None:
    assert script(CELL, Walk((Call("step"),), find_driver("trainer").live_calls), "") is None


def test_a_release_that_returns_no_norm_has_none() -> None:
    class Silent(Calls):
        def clip_norm(self) -> Any:
            return None

    stepped = SimpleNamespace(step=lambda: None)
    trainer = SimpleNamespace(optimizer=stepped, scheduler=stepped, grad_norm=1.0)
    Silent(trainer, Path(), (0,)).update("norm", "keep")
    assert trainer.grad_norm is None
