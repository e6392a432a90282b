"""The order of a search on trials that are made up: what is kept, varied, reduced, and how it goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_distcompat.calls import Call
from pytest_distcompat.cell import Cell
from pytest_distcompat.ext.reach.libraries import FileId
from pytest_distcompat.ext.search.candidate import Candidate
from pytest_distcompat.ext.search.guide import Search, Step, Try
from pytest_distcompat.ext.search.reached import Branches
from pytest_distcompat.ext.search.space import DriverSpace
from pytest_distcompat.ext.search.state import Kept, State, cause_of, corpus_text, read_corpus, smallest_cover
from pytest_distcompat.ext.search.trial import Outcome
from pytest_distcompat.ext.search.yields import Yields
from pytest_distcompat.failures import UsageProblem

FILE = FileId("torch", "distributed/fsdp/api.py")

pytestmark = pytest.mark.usefixtures("few_settings")


def branches(*numbers: int) -> Branches:
    return Branches({FILE: sum(1 << number for number in numbers)})


def nothing_new(_: Candidate) -> Outcome:
    return Outcome(branches(0), "", "", 1.0)


def no_functions(_: Branches) -> Iterator[str]:
    return iter(())


def searched(state: State, attempt: Try, count: int, *, guided: bool = True) -> list[Step]:
    spaces = [DriverSpace("torch", ["ddp", "fsdp2"])]
    search = Search(spaces, state, Branches(), no_functions, guided=guided)
    return list(itertools.islice(search.run([], attempt), count))


def ladder(candidate: Candidate) -> Outcome:
    """Return a new branch for each setting of the first fields that comes beside those before it."""
    names = {setting.partition("=")[0] for setting in candidate.cell.set}
    reached = [0]
    for number in range(4):
        if f"AdamW.field{number}" not in names:
            break
        reached.append(number + 1)
    return Outcome(branches(*reached), "", "", 1.0)


def test_what_is_new_is_kept_and_varied() -> None:
    state = State(seed=3)
    searched(state, ladder, 400)
    blind = State(seed=3)
    searched(blind, ladder, 400, guided=False)
    # The fourth step needs four settings together: no candidate that is drawn anew has more than one.
    assert len(state.new_branches) == 5
    assert len(blind.new_branches) == 2
    assert all(len(kept.branches) for kept in state.kept)


def test_settings_that_unreached_branches_read_are_drawn_more_often() -> None:
    plain = Yields()
    informed = Yields({"field3": 8, "enabled": 1000})
    assert informed.of_setting("AdamW.field3") == 3 * plain.of_setting("AdamW.field3")
    assert informed.of_setting("AdamW.field4") == plain.of_setting("AdamW.field4")
    assert informed.of_setting("x.enabled") < 4 * plain.of_setting("x.enabled")
    informed.add(Candidate.parse("torch ddp-fp32-w2-set_AdamW.field3=1"), 0)
    assert informed.of_setting("AdamW.field3") < 3 * plain.of_setting("AdamW.field3")


def test_a_candidate_is_tried_once() -> None:
    state = State()
    steps = searched(state, nothing_new, 300)
    texts = [str(step.candidate) for step in steps]
    assert len(texts) == len(set(texts)) == len(state.tried)


def test_a_search_that_goes_on_draws_as_one_that_never_stopped(tmp_path: Path) -> None:
    uninterrupted = State(seed=5)
    searched(uninterrupted, ladder, 60)
    first = State(seed=5)
    searched(first, ladder, 25)
    first.write(tmp_path / "state.json")
    second = State.read(tmp_path / "state.json")
    searched(second, ladder, 35)
    assert list(second.tried) == list(uninterrupted.tried)
    assert kept_candidates(second) == kept_candidates(uninterrupted)


def kept_candidates(state: State) -> list[str]:
    return [str(kept.candidate) for kept in state.kept]


def test_shards_draw_differently_and_are_put_together() -> None:
    unit = State(shard="1/2")
    other = State(shard="2/2")
    searched(unit, ladder, 40)
    searched(other, ladder, 40)
    assert list(unit.tried) != list(other.tried)
    tried = {*unit.tried, *other.tried}
    unit.add(other)
    assert set(unit.tried) == tried


def fails_with_two(candidate: Candidate) -> Outcome:
    """Fail where two settings meet, with a number that is chance."""
    names = {setting.partition("=")[0] for setting in candidate.cell.set}
    problem = ""
    if {"AdamW.field1", "AdamW.field2"} <= names:
        problem = f"parity: failed: rank {len(names) % 2}: the loss is {len(names)}.5"
    reached = [0]
    for number in range(10):
        if f"AdamW.field{number}" in names:
            reached.append(number + 1)
    return Outcome(branches(*reached), problem, "", 1.0)


def test_a_failure_is_reduced_and_counted_once() -> None:
    state = State(seed=1)
    steps = searched(state, fails_with_two, 400)
    (failure,) = state.found
    names = {setting.partition("=")[0] for setting in failure.candidate.cell.set}
    assert names == {"AdamW.field1", "AdamW.field2"}
    failed = [step for step in steps if step.outcome.problem]
    assert len(failed) > 1
    assert failure.times == len(failed)
    for step in failed:
        assert step.found is failure


def test_the_cause_of_a_call_is_the_same_with_fewer_arguments() -> None:
    cause = cause_of("export(size=7, safe=False): rank 1: 12 parameters changed: 'a': '91:2ceedb3b207744eb'")
    assert cause == cause_of("export(size=1): rank 0: 11 parameters changed: 'a': '9:3ff444d765a5f4c2'")
    assert cause != cause_of("save(size=1): rank 0: 11 parameters changed: 'a' and 2 others")


def test_the_corpus_has_no_more_than_it_needs(tmp_path: Path) -> None:
    cell = Cell.parse("ddp-fp32-w2-model_mlp")
    calls = (Call("step"), Call("state_dict", (("how", "cpu_offload"),)))
    larger = Kept(Candidate("torch", cell, calls), branches(1, 2, 3))
    part = Kept(Candidate("torch", cell), branches(2, 3))
    other = Kept(Candidate("torch", Cell.parse("ddp-fp32-w2-compile_partial")), branches(3, 4))
    cover = [entry.candidate for entry in smallest_cover([part, larger, other])]
    assert cover == [larger.candidate, other.candidate]
    path = tmp_path / "corpus.json"
    path.write_text(corpus_text([part, larger, other]))
    assert read_corpus(path) == [larger.candidate, other.candidate]


def test_the_corpus_of_the_package_can_be_run() -> None:
    from pytest_distcompat.ext.search.command import CORPUS

    for candidate in read_corpus(CORPUS):
        assert Candidate.parse(str(candidate)) == candidate


def test_another_file_is_no_state(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"format": 1}')
    with pytest.raises(UsageProblem, match="no state of a search: 'kept'"):
        State.read(tmp_path / "state.json")


def test_parts_of_a_candidate() -> None:
    text = "torch fsdp2-fp32-w2-model_mlp-set_AdamW.eps=0.5+AdamW.lr=0.001: step(), export(size=7, safe=False)"
    candidate = Candidate.parse(text)
    assert str(candidate) == text
    assert candidate.only(candidate.parts) == candidate
    parts = [part for part in candidate.parts if "eps" not in part and "safe" not in part]
    simpler = candidate.only(parts)
    assert str(simpler) == "torch fsdp2-fp32-w2-model_mlp-set_AdamW.lr=0.001: step(), export(size=7)"
    assert Candidate.from_data(candidate.as_data()) == candidate
