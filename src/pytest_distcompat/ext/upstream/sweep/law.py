"""The law of cells with settings: how checks judge a cell such as ``...-set_AdamW.amsgrad=true``.

A law says which cells a driver can run, which runs a check reads, what its findings are, and which
failures are expected (``law.Law``). A driver is the class by which a trainer is tested; a cell is
one configuration under test; a setting is a field of an object that the driver configures its
libraries with. The core asks ``SWEEP``, which an entry point names, for each cell with settings,
and the plain law for all others. A check makes a claim about a cell, such as ``parity``: the losses
are those of the reference, a run with one process. It returns findings if its claim does not hold.

Under a setting that the libraries accept all claims hold. Or the libraries refuse the setting, by
an error before the first step. Some settings change the training on purpose; ``rules.json`` says
so in one of two ways. ``without``: a check that the setting breaks in some way that nothing can
judge is not run (``left_out``). ``changes``: a check must find something, as ``parity`` must where
the setting adds noise to embeddings, or the setting had no effect (``findings``).

Where two settings say different values of the same, as ``ds_config.gradient_clipping=0.5`` and
``TrainingArguments.max_grad_norm=1.0`` do, either may win. So there is a reference for each, and
all claims must hold against the same one of them: not the norms of one and the losses of the other.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.expect import Expectation, may_refuse
from pytest_distcompat.ext.upstream.sweep import rules
from pytest_distcompat.ext.upstream.sweep.fields import Source
from pytest_distcompat.ext.upstream.sweep.slice import SLICE, SWEEP_CHECKS
from pytest_distcompat.judge import ACCIDENTS, BUILDS, premature_end
from pytest_distcompat.law import CheckLike, Law
from pytest_distcompat.scenario import REFERENCE_RUN, Run, Scenario
from pytest_distcompat.trace import RunFailure, Trace

#: The name of the reference that follows the other one of two settings which say different values
#: of the same.
OTHER_REFERENCE = "other_reference"
#: Ids of the few cells of the sweep that a session of a built-in suite has in every profile (a
#: profile says which cells a session has: ``smoke``, ``default``, ``sweep``, ...).
_SLICED = frozenset(itertools.chain.from_iterable(SLICE.values()))


#: Checks that compare numbers within tolerances; the precision of the cell says which tolerances.
_OF_NUMBERS = frozenset({"parity", "clipping", "gradients", "export"})


class SweepLaw(Law):
    """The law of cells with settings."""

    name = "sweep"

    def covers(self, cell: Cell) -> bool:
        """Tell whether the cell has settings."""
        return bool(cell.set)

    def unsupported_reason(self, driver: Any, cell: Cell) -> str | None:
        """Return that the driver does not make the object of a setting under the cell's strategy.

        None if it makes all. For example no driver makes a ``DeepSpeedPlugin`` under FSDP2.
        """
        for setting in cell.set:
            makers = _makers(rules.sources_of(driver), setting, cell.strategy)
            if not any(cell.strategy in source.strategies for source in makers):
                name = driver.name or driver.__name__
                owner, _, _ = setting.partition(".")
                return f"the {name} driver has no {owner} under {cell.strategy}"
        return None

    def runs(self, cell: Cell, scenario: Scenario) -> Scenario:
        """Return the runs, with a reference for each of two settings that contradict each other.

        The first reference ignores the second setting, and so follows the first; the other one the
        other way round.
        """
        # Such as ``("ds_config.gradient_clipping=0.5", "TrainingArguments.max_grad_norm=1.0")``.
        settings = rules.contradiction(cell.set)
        if not settings:
            return scenario
        first, second = settings[:2]
        runs: list[Run] = []
        for run in scenario.runs:
            if run == REFERENCE_RUN:
                runs.append(dataclasses.replace(run, ignores=(second,)))
                runs.append(dataclasses.replace(run, name=OTHER_REFERENCE, ignores=(first,)))
            else:
                runs.append(run)
        return dataclasses.replace(scenario, runs=tuple(runs))

    def findings(self, check: CheckLike, cell: Cell, trace: Trace) -> list[str]:
        """Return a check's findings; with contradictory settings, those against both references.

        If the check holds against one reference, it has no findings, but for one: that another
        check holds against the other reference alone. A setting that is meant to change what the
        check looks at must have findings; without any it had no effect. So must one that rounds, by
        the tolerances of the cell's own precision.
        """
        unrounded = cell
        cell = _as_rounded(check, cell)
        findings = check.findings(cell, trace)
        rounding = rules.shows_rounding(cell.set, check.name)
        # A process that stands in for the ranks records shapes without values, so nothing rounds.
        must_show = bool(rounding) and not findings and trace.stand_in is None
        # By the tolerances of the cell's own precision it must have some.
        if must_show and not check.findings(unrounded, trace):
            return [_not_rounded(rounding, unrounded)]
        # The setting that is meant to change what the check looks at; empty if there is none.
        changing = rules.changes(cell.set, check.name)
        if changing:
            return [] if findings else [_no_effect(changing)]
        # No two settings contradict each other, or the check reads no reference.
        if OTHER_REFERENCE not in trace.runs:
            return findings
        # It holds against the first reference; then against the other one.
        if not findings:
            return list(_mixed(check, cell, trace))
        other_findings = check.findings(cell, _against(OTHER_REFERENCE, trace))
        if not other_findings:
            return list(_mixed(check, cell, trace))
        for finding in other_findings:
            findings.append(
                f"against the other of two settings that contradict each other: {finding}"
            )
        return findings

    def expectations(
        self, expectations: Sequence[Expectation], failure: RunFailure | None
    ) -> list[Expectation]:
        """Return what is expected: a setting is accepted or refused.

        It may also mend what is known to fail without it.

        Args:
            expectations: The failures that are declared for the cell.
            failure: How its first run that failed ended; None if none failed.
        """
        # A strict expectation would be red if nothing fails.
        lenient = [dataclasses.replace(expectation, strict=False) for expectation in expectations]
        return lenient + _refused_setting(failure)

    def read_at_checkpoints(self, cell: Cell) -> tuple[str, ...]:
        """Return option ``set`` if all settings are read when a checkpoint is written or loaded.

        Costly checks of checkpoints are run once for cells that differ only in options without a
        bearing on checkpoints. An option that is returned has one, so such a cell has its own.
        """
        if all(rules.concerns_checkpoints(setting) for setting in cell.set):
            return ("set",)
        return ()

    def left_out(self, cell: Cell, checks: Mapping[str, CheckLike], profile: str) -> dict[str, str]:
        """Return the checks that are not run for the settings of a cell, each with the reason.

        The sweep has thousands of cells, so each has few checks: ``SWEEP_CHECKS``, and those that
        the rules of its settings add (key ``checks``), but for those that the rules leave out (key
        ``without``). Cells with settings that a suite has of its own accord keep all checks.

        Args:
            cell: The cell.
            checks: Name -> check, for those that apply to the cell.
            profile: The session's profile: in ``sweep`` all cells are the sweep's, in others only
                the sliced ones. ``default`` is run often, and leaves costly checks to ``sweep``.
        """
        is_sliced = cell.id in _SLICED
        if profile != "sweep" and not is_sliced:
            return {}
        reasons: dict[str, str] = {}
        if profile == "default":
            for name, check in checks.items():
                if check.costly:
                    reasons[name] = "the sweep runs it"
        return {**reasons, **_left_out_of_sweep(cell, checks)}


def _no_effect(setting: str) -> str:
    """Return the finding that a training with a setting is the one without it."""
    return f"{setting} has no effect: the training equals the reference, which is without it"


def _not_rounded(setting: str, cell: Cell) -> str:
    """Return the finding that a setting which rounds leaves the training as exact as without it."""
    exact = f"the training equals the reference as one in {cell.precision} does"
    return f"{setting} rounds nothing: {exact}"


def _as_rounded(check: CheckLike, cell: Cell) -> Cell:
    """Return the cell for a check of numbers, in the precision as which a setting rounds.

    A setting may have products in fewer bits than the cell's precision: then its tolerances apply.
    """
    precision = rules.rounds_as(cell.set)
    if not precision or check.name not in _OF_NUMBERS:
        return cell
    return dataclasses.replace(cell, precision=precision)


def _left_out_of_sweep(cell: Cell, checks: Iterable[str]) -> dict[str, str]:
    """Return the checks that the sweep does not run for the settings of a cell, with the reason."""
    wanted = set(SWEEP_CHECKS)
    reason_by_failing_check: dict[str, str] = {}
    for setting in cell.set:
        # A rule is a dict of ``rules.json``: ``{"fields": [...], "checks": ["resume"], ...}``.
        rule = rules.rule_of(setting.partition("=")[0])
        wanted.update(rule.get("checks", ()))
        for check in rules.meant_to_fail(setting):
            reason_by_failing_check.setdefault(check, rule["reason"])
    reasons: dict[str, str] = {}
    for check in checks:
        if reason_by_failing_check.get(check):
            reasons[check] = reason_by_failing_check[check]
        elif check not in wanted:
            reasons[check] = f"of this setting only {', '.join(SWEEP_CHECKS)} are run"
    return reasons


def _makers(sources: Iterable[Source], setting: str, strategy: str) -> list[Source]:
    """Return the objects of libraries that may have a setting.

    They are those that name it, as the source ``TrainingArguments`` does
    ``TrainingArguments.optim=sgd``. If none does, they are those whose kind is ``subclasses``: such
    a source stands for all subclasses of a class, as of accelerate's ``KwargsHandler``, whose names
    are not known without the library.
    """
    by_name = []
    of_subclasses = []
    for source in sources:
        if source.names(setting, strategy):
            by_name.append(source)
        if source.kind == "subclasses":
            of_subclasses.append(source)
    return by_name or of_subclasses


def _against(reference: str, trace: Trace) -> Trace:
    """Return the trace, the records of all runs, with the run of that name as the reference."""
    runs = {**trace.runs, REFERENCE_RUN.name: trace.runs[reference]}
    return dataclasses.replace(trace, runs=runs)


def _agrees_with(check: CheckLike, cell: Cell, trace: Trace) -> list[int]:
    """Return the indices of those of two contradictory settings that agree with a claim.

    ``[0]`` if the claim holds only against the reference that follows the first setting, ``[0, 1]``
    if it holds against both, ``[]`` if against neither.
    """
    settings: list[int] = []
    for nth, reference in enumerate((REFERENCE_RUN.name, OTHER_REFERENCE)):
        # The claim alone, without this law, which would compare with both references again.
        findings = check.claim(cell, _against(reference, trace))
        if not any(findings):
            settings.append(nth)
    return settings


def _mixed(check: CheckLike, cell: Cell, trace: Trace) -> Iterator[str]:
    """Yield a finding for each other check that agrees with the other of two settings alone.

    The settings contradict each other, and this check agrees with one of them alone. So the
    training follows each of them in part.

    Args:
        check: The check whose finding it is.
        cell: The cell.
        trace: The records of its runs, with both references.
    """
    settings = rules.contradiction(cell.set)
    if not settings:
        return
    own = _agrees_with(check, cell, trace)
    driver = find_driver(trace.driver)
    meant: set[str] = set()
    for setting in cell.set:
        meant.update(rules.meant_to_fail(setting))
    for other in CHECKS.by_name.values():
        if other.not_applicable(cell, driver):
            continue
        # The trace has the runs of this check; only checks of the same runs can be judged by it.
        same_runs = other.runs(cell, driver) == check.runs(cell, driver)
        # ``premature_end``: a run ended before the snapshots that the check needs.
        if other.name in meant or not same_runs or premature_end(other, trace):
            continue
        # A check that agrees with neither has findings of its own.
        others = _agrees_with(other, cell, trace)
        if len(own) == len(others) == 1 and own != others:
            own_setting = settings[own[0]]
            other_setting = settings[others[0]]
            yield (
                f"a mix of two settings that contradict each other: {check.name} holds with "
                f"{own_setting} alone, {other.name} with {other_setting} alone; "
                "expected one of them everywhere"
            )


def _refused_setting(end: RunFailure | None) -> list[Expectation]:
    """Return what allows a run to end before its first step, with an error about a setting.

    Empty if no run failed, or one failed later. Errors of Python itself in a library's code
    (``AttributeError``, the pattern ``ACCIDENTS``) speak of nothing that a user has set, and are no
    refusals.
    """
    # ``BUILDS`` are the actions before the first step.
    if end is None or end.action not in BUILDS:
        return []
    return [may_refuse(match=rf"raised (?!{ACCIDENTS})[\w.]+: \S")]


#: The law that the entry point in the group ``pytest_distcompat.laws`` names.
SWEEP = SweepLaw()
