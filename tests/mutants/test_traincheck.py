"""All 26 errors of the TrainCheck artefact have a verdict; those in no installed library are seen in drivers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from mutants import profiled
from mutants.catalog import BY_ID
from mutants.mutation import Mutant, Sighting, edited
from mutants.of_traincheck import UNSEEN, VERDICTS
from mutants.stack import Stack, stack

from pytest_distcompat.cell import Cell


@dataclass(frozen=True)
class Seen:
    """An error that no fix can be taken out of: a user's, or one that the installed stack still has."""

    id: str
    sighting: Sighting
    sound: tuple[str, str]


DRIVERS = "mutants.drivers"
SEEN = (
    Seen(
        "SO-60335387",
        Sighting(f"{DRIVERS}:NeverCleared", "ddp-fp32-w2", "parity", "step 2: .*the gradient norm is"),
        ("torch", "ddp-fp32-w2"),
    ),
    Seen(
        "FORUM-84911",
        Sighting(f"{DRIVERS}:NormsOnly", "ddp-fp32-w2", "optimizer", "trainable parameter .* is not in the optimizer"),
        ("torch", "ddp-fp32-w2"),
    ),
    Seen(
        "PT-104336",
        Sighting(f"{DRIVERS}:Moved", "ddp-fp32-w2", "active", "no gradient was reduced in a step"),
        ("torch", "ddp-fp32-w2"),
    ),
    Seen(
        "X-jxmnop",
        Sighting(f"{DRIVERS}:Unwrapped", "ddp-fp32-w2", "active", "no gradient was reduced in a step"),
        ("torch", "ddp-fp32-w2"),
    ),
    Seen(
        "MM-702",
        Sighting(f"{DRIVERS}:NeverFrozen", "fsdp2-fp32-w2-frozen", "optimizer", "frozen parameter .* moved"),
        ("torch", "fsdp2-fp32-w2-frozen"),
    ),
    Seen(
        "DS-6770",
        Sighting(f"{DRIVERS}:OtherParameters", "zero2-fp32-w2", "active", "KeyError: Parameter containing"),
        ("deepspeed", "zero2-fp32-w2"),
    ),
    Seen(
        "DS-6089",
        Sighting(f"{DRIVERS}:UnevenTokens", "zero0-fp32-w2", "optimizer", "SIGABRT during 'step'|in a collective"),
        (f"{DRIVERS}:Experts", "zero0-fp32-w2"),
    ),
    Seen(
        "AC-2665",
        Sighting("accelerate", "fsdp1-fp32-w2-no_use_orig_params", "optimizer", "no parameters of the live model"),
        ("accelerate", "fsdp1-fp32-w2"),
    ),
    Seen(
        "DS-5489",
        Sighting("deepspeed", "zero1-fp32-w2-frozen", "export", "are in no exported file"),
        ("deepspeed", "zero2-fp32-w2"),
    ),
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    cells = tuple((seen.sighting.driver, seen.sighting.cell) for seen in SEEN)
    with stack(tmp_path_factory.mktemp("installed"), (), cells) as environment:
        yield environment


@pytest.mark.nightly
@pytest.mark.spawn
@pytest.mark.parametrize("seen", SEEN, ids=lambda seen: seen.id)
def test_the_suite_finds_the_error(seen: Seen, installed: Stack) -> None:
    check = seen.sighting.check
    assert installed.verdict(*seen.sound, check).status == "passed"
    verdict = installed.verdict(seen.sighting.driver, seen.sighting.cell, check)
    assert verdict.status in {"failed", "crashed", "hung", "known"}, verdict
    assert re.search(seen.sighting.match, verdict.message), verdict.message


@pytest.mark.parametrize("mutant", UNSEEN, ids=lambda mutant: mutant.id)
def test_an_unseen_error_fits_the_installed_source(mutant: Mutant) -> None:
    for file, text in edited(mutant).items():
        compile(text, file, "exec")


def test_each_of_the_26_has_a_verdict_and_the_page_counts_them() -> None:
    kinds = Counter(
        re.findall(r"\*\*(caught|missed|not expressible)\*\*", " ".join(text for _, text in VERDICTS.values()))
    )
    assert kinds == {"caught": 18, "missed": 4, "not expressible": 4}
    page = " ".join((Path(__file__).parents[2] / "docs" / "mutants.md").read_text(encoding="utf-8").split())
    assert "catches 18 of the 26, five of them" in page
    assert sum("own driver" in text for _, text in VERDICTS.values()) == 5
    assert sum("still there" in text for _, text in VERDICTS.values()) == 4


def test_the_profile_full_has_the_cell_of_frozen_parameters() -> None:
    (seen,) = (sighting for sighting in SEEN if sighting.id == "DS-5489")
    assert Cell.parse(seen.sighting.cell) in profiled.cells("full", seen.sighting.driver)


def test_what_is_caught_names_its_mutant_or_its_cell() -> None:
    for name, (_, verdict) in VERDICTS.items():
        if "**caught**" in verdict:
            cells = [seen.sighting for seen in SEEN if seen.id == name]
            named = any(f"`{cell.cell}:{cell.check}`" in verdict for cell in cells)
            assert named or any(f"`{mutant}`" in verdict for mutant in BY_ID), name
