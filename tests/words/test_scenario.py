"""The scenarios are what checks rely on."""

from __future__ import annotations

import pytest

from pytest_distcompat.checks import CHECKS
from pytest_distcompat.scenario import LIVES, RESUME, TRAIN, Scenario


@pytest.mark.parametrize("scenario", [TRAIN, RESUME], ids=lambda scenario: scenario.name)
def test_a_life_finds_the_checkpoint_of_one_before_it(scenario: Scenario) -> None:
    saved: list[str] = []
    for life in scenario.lives:
        assert LIVES[life.name] is life
        assert ("load" in life.verbs) == bool(life.after)
        assert not life.after or life.after in saved
        assert life.verbs[:2] == ("plain", "build")
        saved += [life.name] if "save" in life.verbs else []


def test_scenarios_that_begin_alike_share_their_lives() -> None:
    assert RESUME.lives[: len(TRAIN.lives)] == TRAIN.lives


def test_a_resumed_life_takes_the_batches_that_the_first_took_after_saving() -> None:
    train, resume = RESUME.lives
    before = train.verbs[: train.verbs.index("save")].count("step")
    assert resume.first_step == train.first_step + before
    assert resume.verbs.count("step") == train.verbs.count("step") - before


@pytest.mark.parametrize("name", CHECKS.names())
def test_what_a_check_waits_for_happens_in_its_scenario(name: str) -> None:
    check = CHECKS.get(name)
    verbs = {life.name: life.verbs for life in check.scenario.lives}
    assert check.until
    for life, verb, nth in check.until:
        assert verbs[life].count(verb) > nth
