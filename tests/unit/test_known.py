"""Known issues are data: read strictly, applied by version, driver, device and cell."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import all_check_names
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.drivers.trainer import TrainerDriver
from pytest_distcompat.expect import Expectation
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.known import KnownIssue, applying, is_about_driver, names_in_issues, read_file, shipped
from pytest_distcompat.strategies import STRATEGIES

ENTRY = """
[[issue]]
id = "one"
link = "https://example.org/1"
reason = "because"
check = "resume"
match = "is empty"
drivers = ["mine"]
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A file of known issues with that text below the version."""

    def make(text: str) -> Path:
        path = tmp_path / "mine.toml"
        path.write_text(f"version = 1\n{text}", encoding="utf-8")
        return path

    return make


def test_an_entry_becomes_an_expectation_with_its_link(write: Write) -> None:
    issues = read_file(write(ENTRY + 'cells = { strategy = ["fsdp1", "fsdp2"], precision = "fp32" }\n'))
    (expectation,) = applying(issues, ("mine",), "cpu")
    assert expectation.covers(Cell("fsdp2", "fp32"), "resume")
    assert not expectation.covers(Cell("ddp", "fp32"), "resume")
    assert not expectation.covers(Cell("fsdp2", "fp32"), "names")
    assert expectation.reason == "because (https://example.org/1)"
    assert expectation.matches("the state is empty now")


@pytest.mark.parametrize("kind", ["fails", "refuses"])
def test_a_driver_that_derives_from_the_one_named_may_show_the_bug(write: Write, kind: str) -> None:
    """Trainer has a bug also under a user's subclass of the driver, which may as well avoid it."""

    class Mine(TrainerDriver):
        name = "mine"

    class Renamed(Mine):
        name = "renamed"

    issues = read_file(write(ENTRY.replace('"mine"', '"driver:trainer"') + f"kind = '{kind}'\n"))
    for driver, strict in ((TrainerDriver, True), (Mine, False), (Renamed, False)):
        (expectation,) = applying(issues, names_in_issues(driver), "cpu")
        assert expectation.strict is strict
        # What `distcompat doctor` lists.
        assert is_about_driver(issues[0], driver)
    assert not applying(issues, names_in_issues(DRIVERS.get("torch")), "cpu")
    assert not is_about_driver(issues[0], DRIVERS.get("torch"))


@pytest.mark.parametrize("kind", ["fails", "may_fail"])
def test_an_entry_declares_consequences(write: Write, kind: str) -> None:
    text = ENTRY.replace('"resume"', '["resume", "names"]') + f"kind = '{kind}'\nalso = 'rank \\d: stale'\n"
    expectations = applying(read_file(write(text)), ("mine",), "cpu")
    assert len(expectations) == 2
    for expectation in expectations:
        assert expectation.explains("rank 1: stale") is True
        assert expectation.matches("rank 1: stale") is False


def covers(expectations: Iterable[Expectation], cell: str, check: str) -> bool:
    """Return whether one of the expectations is about this check in this cell."""
    parsed = Cell.parse(cell)
    return any(expectation.covers(parsed, check) for expectation in expectations)


def entry(name: str) -> KnownIssue:
    """Return the shipped issue of that id."""
    (issue,) = (issue for issue in shipped() if issue.id == name)
    return issue


def test_several_cells_are_several_expectations(write: Write) -> None:
    text = ENTRY + '[[issue.cells]]\nstrategy = "ddp"\n[[issue.cells]]\nstrategy = "fsdp1"\ncompile = true\n'
    expectations = applying(read_file(write(text)), ("mine",), "cpu")
    assert covers(expectations, "ddp-fp32-w2", "resume")
    assert not covers(expectations, "fsdp1-fp32-w2", "resume")
    assert covers(expectations, "fsdp1-fp32-w2-compile", "resume")


def test_several_checks_are_several_expectations(write: Write) -> None:
    text = ENTRY.replace('check = "resume"', 'check = ["resume", "names"]')
    expectations = applying(read_file(write(text)), ("mine",), "cpu")
    assert covers(expectations, "ddp-fp32-w2", "resume")
    assert covers(expectations, "ddp-fp32-w2", "names")
    assert not covers(expectations, "ddp-fp32-w2", "dtypes")


@pytest.mark.parametrize("option", ["grad_accum_2", "frozen", "activation_checkpointing"])
def test_without_zero_a_step_under_autotp_is_wrong_from_the_first_on(option: str) -> None:
    cell = Cell.parse(f"zero0-bf16_upcast-w4-{option}-tp_2")
    expectations = applying(shipped(), ("deepspeed", "driver:deepspeed"), "cpu")
    strict = [expectation for expectation in expectations if expectation.kind == "fails"]
    for check in ("parity", "clipping"):
        (expectation,) = [expectation for expectation in strict if expectation.covers(cell, check)]
        assert expectation.matches("step 1: the gradient norm is 1; 2 in the reference")


@pytest.mark.parametrize(("precision", "expected"), [("fp32", [True, True]), ("fp8", [True, False])])
def test_in_8_bits_the_clipping_of_compiled_blocks_under_tp_passes(precision: str, expected: list[bool]) -> None:
    cell = f"fsdp2-{precision}-w4-compile_regional-tp_2"
    expectations = applying(shipped(), ("torch", "driver:torch"), "cpu")
    parity, clipping = expected
    assert covers(expectations, cell, "parity") is parity
    assert covers(expectations, cell, "clipping") is clipping


def test_a_refusal_is_one(write: Write) -> None:
    (expectation,) = applying(read_file(write(ENTRY + 'kind = "refuses"\n')), ("mine",), "cpu")
    assert expectation.kind == "refuses"


@pytest.mark.parametrize(
    ("more", "applies"),
    [
        ("", True),
        ('packages = ["pytest>=1"]', True),
        ('packages = ["pytest<1"]', False),
        ('packages = ["pytest>=1", "no-such-package"]', False),
        ('packages = ["no-such-package"]', False),
        ('device = "cpu"', True),
        ('device = "cuda"', False),
    ],
)
def test_an_entry_applies_if_versions_and_device_fit(write: Write, more: str, applies: bool) -> None:
    issues = read_file(write(f"{ENTRY}{more}\n"))
    assert bool(applying(issues, ("mine",), "cpu")) is applies


@pytest.mark.parametrize("until", ["'2020-01-31'", "2020-01-31"])
def test_an_entry_may_end(write: Write, until: str) -> None:
    issues = read_file(write(f"{ENTRY}until = {until}\n"))
    (expectation,) = applying(issues, ("mine",), "cpu")
    assert expectation.until == "2020-01-31"
    assert expectation.ended is True


def test_an_entry_applies_only_to_drivers_of_the_library(write: Write) -> None:
    issues = read_file(write(ENTRY))
    assert not applying(issues, (), "cpu")
    assert not applying(issues, ("other",), "cpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[issue]]\nid = 'one'\n", r"issue 1 \(one\): reason is missing"),
        (
            ENTRY + "colour = 'red'\n",
            r"no key named 'colour'\. Known: also, cells, check, device, drivers, fixed_in, id",
        ),
        (ENTRY + "kind = 'maybe'\n", "kind 'maybe'; expected one of fails, may_fail, refuses, may_refuse"),
        (ENTRY + "cells = { flavour = 'sweet' }\n", "no facet named 'flavour'"),
        (ENTRY + "packages = ['accelerate=>1']\n", "one"),
        (ENTRY.replace('"is empty"', '"("'), "no regular expression"),
        (ENTRY + "also = '('", "also='\\(' is no regular expression"),
        (
            ENTRY + "kind = 'refuses'\nalso = 'stale'",
            "also is for what checks find; kind 'refuses' has one error",
        ),
        (ENTRY + ENTRY, "more than one issue has the id 'one'"),
        ("issue = [", "known issues .*mine.toml"),
        ("issue = [1]", r"expected tables, \[\[\.\.\.\]\], got \[1\]"),
        (ENTRY.replace("[[issue]]", "[issue]"), r"expected tables, \[\[\.\.\.\]\], got "),
        (ENTRY.replace("[[issue]]", "[[issues]]"), "no key named 'issues'. Known: issue, version"),
        (ENTRY + "until = 'soon'", r"issue 1 \(one\): .*until='soon'; expected a day, as '2026-12-01'"),
        (ENTRY + "until = 2026-12-01T09:00:00", "until='2026-12-01 09:00:00'; expected a day"),
        (ENTRY.replace('"is empty"', '["is empty"]'), r"match=\['is empty'\]; expected a text"),
    ],
)
def test_an_invalid_file_is_an_error_that_names_the_key(write: Write, text: str, message: str) -> None:
    with pytest.raises(UsageProblem, match=message):
        read_file(write(text))


def test_a_file_of_another_format_or_none_is_an_error(tmp_path: Path) -> None:
    newer = tmp_path / "newer.toml"
    newer.write_text("version = 2\n", encoding="utf-8")
    with pytest.raises(UsageProblem, match="version is 2; this release reads version 1"):
        read_file(newer)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageProblem, match=r"binary\.toml: .*can't decode"):
        read_file(binary)
    with pytest.raises(UsageProblem, match=r"gone\.toml"):
        read_file(tmp_path / "gone.toml")


@pytest.mark.parametrize("issue", shipped(), ids=lambda issue: issue.id)
def test_shipped_entries_name_existing_cells_and_checks(issue: object) -> None:
    assert isinstance(issue, KnownIssue)
    assert set(issue.check) <= {"*", *all_check_names()}
    assert issue.link.startswith("https://")
    libraries = set[str]().union(*map(names_in_issues, DRIVERS.by_name.values()))
    assert set(issue.drivers) <= libraries
    for cells in issue.cells:
        strategies = cells.get("strategy", ())
        if not isinstance(strategies, tuple):
            strategies = (strategies,)
        assert set(strategies) <= set(STRATEGIES.names())


UPSTREAM = "https://github.com/pytest-distcompat/pytest-distcompat/blob/main/"


@pytest.mark.parametrize("issue", shipped(), ids=lambda issue: issue.id)
def test_a_link_leads_to_one_bug_or_to_its_script(issue: KnownIssue) -> None:
    """No tracker's front page. A script that is the link has the text to report: what is expected, and what is seen."""
    assert not re.search(r"/(issues|pulls?|discussions)/?$", issue.link), "the front page of a tracker"
    if issue.link.startswith(UPSTREAM):
        assert issue.link == UPSTREAM + issue.script
    if issue.script:
        script = Path(__file__).parents[2] / issue.script
        tree = ast.parse(script.read_text(encoding="utf-8"))
        text = ast.get_docstring(tree)
        assert text is not None
        assert re.search(r"\bExpected\b.*\bSeen\b", text, re.DOTALL)


@pytest.mark.parametrize(
    ("key", "known"),
    [
        # What a rank without a local shard has in place of its groups.
        ("optimizer.param_groups", True),
        ("app.optim.param_groups", True),
        # What is missed where the optimizer was not saved at all.
        ("optimizer.param_groups.blocks.0.linear.weight.lr", False),
        ("optimizer.state.lm_head.weight.step", False),
    ],
)
def test_a_rank_without_a_shard_differs_from_an_unsaved_optimizer(key: str, *, known: bool) -> None:
    """Under FSDP1 with a driver of any name: torch's bug is nothing that its user can mend."""
    issue = entry("torch-fsdp1-rank-without-shard-anywhere")
    text = f"Traceback (most recent call last):\nRuntimeError: Missing key in checkpoint state_dict: {key}.\n\nmore"
    (expected,) = issue.expectations
    assert expected.matches(text) == known
    assert expected.covers(Cell.parse("fsdp1-fp32-w2-frozen"), "reshard")
    assert not expected.strict


@pytest.mark.parametrize(("form", "known"), [("", True), ("-state_dict_full", False)])
def test_a_rank_without_a_shard_is_in_whole_files_too(form: str, *, known: bool) -> None:
    cell = f"fsdp1-fp32-w4-model_mlp{form}"
    about_empty_shards = []
    for expectation in applying(shipped(), ("torch", "driver:torch"), "cpu"):
        if expectation.strict and "without a local shard" in expectation.reason:
            about_empty_shards.append(expectation)
    assert covers(about_empty_shards, cell, "resume") is known
    assert covers(about_empty_shards, cell, "reshard") is known


@pytest.mark.parametrize(
    ("loaded", "known"),
    [
        ("last_epoch=None lr=[0.0] 0a1b2c3d4e5f", True),
        # OneCycle has no last rate before its first step.
        ("last_epoch=None lr=None 0a1b2c3d4e5f", True),
        ("last_epoch=None lr=[0.0] 5f4e3d2c1b0a", False),
        ("none", False),
    ],
)
def test_a_stale_rate_of_deepspeed_is_known_and_a_schedule_not_loaded_is_not(loaded: str, *, known: bool) -> None:
    issue = entry("deepspeed-schedules-last-lr")
    (expected,) = issue.expectations
    finding = f"rank 0: scheduler is at {loaded!r}; saved at 'last_epoch=None lr=[0.001] 0a1b2c3d4e5f'"
    assert expected.matches(finding) is known
    assert expected.covers(Cell.parse("zero2-fp32-w2"), "resume")
    assert not expected.covers(Cell.parse("ddp-fp32-w2"), "resume")


@pytest.mark.parametrize(
    ("release", "applies"), [("0.17.5", True), ("0.17.6", False), ("0.18.2", False), ("0.18.3", True)]
)
def test_zero2_has_nothing_to_clear_in_releases_that_add_up_nothing(
    monkeypatch: pytest.MonkeyPatch, release: str, *, applies: bool
) -> None:
    monkeypatch.setattr("pytest_distcompat.known.issue.version_of", lambda name: release)
    issue = entry("deepspeed-zero-grad-zero2")
    assert bool(applying((issue,), ("driver:deepspeed",), "cpu")) is applies


@pytest.mark.parametrize(("step", "known"), [(2, False), (6, False), (7, True), (9, True), (12, True)])
def test_decay_that_no_one_asked_for_shows_after_some_steps(step: int, *, known: bool) -> None:
    """Before, a loss that differs has another cause."""
    issue = entry("transformers-deepspeed-decay")
    assert issue.expectations
    for expectation in issue.expectations:
        assert expectation.matches(f"step {step}: the loss is 1.63127; 1.63124 in the reference") is known


@pytest.mark.parametrize(("release", "applies"), [("5.17.0", True), ("5.18.0", False)])
def test_a_walk_of_trainer_that_resumes_on_the_cpu_is_known_in_old_releases(
    monkeypatch: pytest.MonkeyPatch, release: str, *, applies: bool
) -> None:
    monkeypatch.setattr("pytest_distcompat.known.issue.version_of", lambda name: release)
    issue = entry("transformers-indexed-cpu-walk")
    (expected,) = issue.expectations
    assert bool(applying((issue,), ("transformers",), "cpu")) is applies
    assert expected.covers(Cell.parse("ddp-fp32-w2-model_mlp"), "walk")
    assert not expected.strict


@pytest.mark.parametrize(
    ("driver", "cell", "check", "seen"),
    [
        ("trainer", "fsdp2-fp16_mixed-w1", "resume", "AssertionError: Attempted step but _scale is None.  This may"),
        ("trainer", "fsdp2-fp16_mixed-w2", "data", "AssertionError: Attempted step but _scale is None.  This may"),
        (
            "accelerate",
            "fsdp2-fp16_mixed-w1",
            "resume",
            "rank 0: the gradient scaler is at {'scale': 3.0}; saved at {}",
        ),
        (
            "deepspeed",
            "zero3-bf16_upcast-w2",
            "reshard",
            "RuntimeError: Expected all, but got state_steps is on cpu, dif",
        ),
        ("accelerate", "ddp-fp32-w2-compile", "dtypes", "rank 0: products of float32 are in TF32 since build"),
        ("trainer", "fsdp2-fp32-w1-compile_regional", "dtypes", "rank 1: products of float32 are in TF32 since build"),
    ],
)
def test_what_was_seen_on_a_gpu_is_known_there(driver: str, cell: str, check: str, seen: str) -> None:
    libraries = names_in_issues(DRIVERS.get(driver))
    for device, known in (("cpu", False), ("cuda", True)):
        expectations = applying(shipped(), libraries, device)
        matching = [expectation for expectation in expectations if expectation.matches(seen)]
        assert covers(matching, cell, check) is known


#: Entry -> the cell and the check, at so many ranks, in which one has it. Each needs a second rank.
OF_TWO_RANKS = {
    "accelerate-gather-iterable": ("ddp-fp32-w{}", "evaluation"),
    "transformers-eval-loss": ("ddp-fp32-w{}", "evaluation"),
    "accelerate-pad-bool": ("ddp-fp32-w{}", "exchanges"),
    "accelerate-split-changes": ("ddp-fp32-w{}", "exchanges"),
    "accelerate-split-tuple": ("ddp-fp32-w{}", "exchanges"),
    "accelerate-skip-dispatched": ("ddp-fp32-w{}", "coverage"),
    "transformers-same-dropout": ("ddp-fp32-w{}-model_dropout", "randomness"),
}


@pytest.mark.parametrize("name", OF_TWO_RANKS)
def test_what_needs_two_ranks_is_not_expected_of_one(name: str) -> None:
    expectations = entry(name).expectations
    cell, check = OF_TWO_RANKS[name]
    assert not covers(expectations, cell.format(1), check)
    assert covers(expectations, cell.format(2), check)
    assert covers(expectations, cell.format(3), check)


@pytest.mark.parametrize(
    ("cell", "check", "devices"),
    [
        # accelerate wraps DDP for one rank on the CPU, and none on one GPU.
        ("ddp-fp32-w1-grad_accum_2", "accumulation", ["cpu"]),
        ("ddp-fp32-w1-model_mlp-compile_aot_eager", "observers", ["cpu"]),
        ("ddp-fp32-w2-model_mlp-compile_aot_eager", "observers", ["cpu", "cuda"]),
        ("fsdp1-fp32-w1-model_mlp-compile_aot_eager", "observers", ["cpu", "cuda"]),
        # A loader's seed comes from the CPU's generator, and masks on a GPU do not.
        ("ddp-fp32-w1-model_dropout", "resume", ["cpu"]),
        ("ddp-fp32-w2-model_dropout", "resume", ["cpu"]),
    ],
)
def test_a_bug_of_accelerate_is_expected_where_it_is(cell: str, check: str, devices: list[str]) -> None:
    for device in ("cpu", "cuda"):
        expectations = applying(shipped(), ("accelerate", "driver:accelerate"), device)
        strict = [expectation for expectation in expectations if expectation.strict]
        assert covers(strict, cell, check) == (device in devices)
