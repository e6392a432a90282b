"""The pytest plugin: hooks only. What they decide is decided elsewhere, and imported when it is needed.

A session without distributed tests imports this file, ``options`` and what they import on top, nothing else.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Generator
from typing import Any

import pytest

from pytest_distcompat.plugin import options, pyproject
from pytest_distcompat.plugin.current import session_of
from pytest_distcompat.plugin.inside import launched

_MARK = "distcompat"
# Kept apart from rank_session.ON_RANK & co.: those modules are not imported in a session without distributed tests.
_IN_USE: pytest.StashKey[bool] = pytest.StashKey()
_COLLECTED: pytest.StashKey[list[pytest.Item]] = pytest.StashKey()  # the items before any plugin had its say
# Whether reports here are weighed by what the user declares as known.
_WEIGHS: pytest.StashKey[bool] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options and ini keys."""
    options.add(parser)


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Of the ranks of somebody's launch, one reports."""
    if launched.here() and not launched.first():
        from pytest_distcompat.plugin.inside.rank_output import no_terminal

        no_terminal(early_config)


@pytest.hookimpl(tryfirst=True)  # report files are opened by the hooks of others
def pytest_configure(config: pytest.Config) -> None:
    """Mark, fixtures, and a first look at what was given, so that a wrong word ends the run before it starts."""
    from pytest_distcompat.plugin import fixtures, scripted

    config.addinivalue_line(
        "markers",
        "distcompat(world_size=N, strategies=[...], precisions=[...], options=[{...}], timeout=SECONDS, "
        "reuse='never'|'module'|'session'): run the test on every rank of a torchrun process group; with strategies, "
        "precisions or options once for each cell.",
    )
    config.pluginmanager.register(fixtures, "distcompat-fixtures")
    config.pluginmanager.register(scripted, "distcompat-scripts")
    if launched.here() and not _on_rank(config):
        from pytest_distcompat.plugin.inside import external_launch

        external_launch.enter(config)
    given = options.given(config)
    for name in given:
        options.setting(config, name)
    # With xdist this process learns from the workers' reports that there were tests of ours.
    if given or pyproject.known(config) or _is_controller(config):
        session = session_of(config)
        # What one rank says for itself is not yet what happened.
        config.stash[_WEIGHS] = bool(session.own) and not _on_rank(config)
        if given:
            # To resolve them is to check them.
            _ = session.world_size, session.verified


def _on_rank(config: pytest.Config) -> bool:
    from pytest_distcompat.plugin.inside.rank_session import ON_RANK

    return ON_RANK in config.stash


def pytest_report_header(config: pytest.Config) -> list[str]:
    """What was set, and where; nothing was, nothing is said."""
    names = options.given(config)
    if not names:
        return []
    session = session_of(config)
    told = [
        f"{name.removeprefix('distcompat_')} {found.text} (from {found.origin})"
        for name in names
        for found in [options.setting(config, name)]
    ]
    return [f"distcompat: {', '.join(told)}; {session.device} x {session.world_size}"]


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """On what the distributed tests will run, if there are any."""
    if _IN_USE not in config.stash:
        return []
    session = session_of(config)
    where = f"{session.gpus} GPUs, nccl" if session.gpus else "CPU, gloo"
    if session.gpus and session.ranks_each > 1:
        where += f" (gloo where up to {session.ranks_each} ranks share a GPU)"
    origin = session.setting("world_size").origin
    launcher = session.setting("launcher").value
    limit = f"time limit {session.timeout:g} s ({session.setting('timeout').origin})"
    return [f"distcompat: {where}, world size {session.world_size} ({origin}), {limit}, {launcher} launcher"]


def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> pytest.Class | None:
    """A suite is collected whatever its name, and its mistakes are errors of collection."""
    # Who inherits the suite has imported it; nobody else is to pay for that.
    suite = sys.modules.get("pytest_distcompat.suite")
    if suite is None or not isinstance(obj, type) or not issubclass(obj, suite.CompatSuite):
        return None
    from pytest_distcompat.failures import UsageProblem
    from pytest_distcompat.plugin.suite import cases
    from pytest_distcompat.plugin.suite.declared_names import check_attributes

    try:
        check_attributes(obj)
        if not cases.is_suite(obj):
            return None
        cases.validate(obj, session_of(collector.config).world_size)
    except UsageProblem as problem:
        raise pytest.Collector.CollectError(str(problem)) from None
    made: pytest.Class = pytest.Class.from_parent(collector, name=name, obj=obj)
    return made


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Suites and marked tests become one item a cell."""
    mark = next(metafunc.definition.iter_markers(_MARK), None)
    if mark is not None:
        _generate_marked(metafunc, mark)
    elif "distcompat_case" in metafunc.fixturenames and metafunc.cls is not None:
        from pytest_distcompat.failures import UsageProblem
        from pytest_distcompat.plugin.suite import cases

        session = session_of(metafunc.config)
        try:
            chosen = cases.cases(metafunc.cls, session) if cases.is_suite(metafunc.cls) else []
        except UsageProblem as problem:
            raise pytest.Collector.CollectError(str(problem)) from None
        if chosen:
            session.modules += tuple(cases.modules_of(metafunc.cls, chosen))
        metafunc.parametrize("distcompat_case", chosen, ids=[case.id for case in chosen], indirect=True)


def _generate_marked(metafunc: pytest.Metafunc, mark: pytest.Mark) -> None:
    from pytest_distcompat.plugin.marked import marker

    try:
        read = marker.read_mark(mark)
    except ValueError as problem:
        raise pytest.Collector.CollectError(f"{metafunc.definition.nodeid}: {problem}") from None
    if read.has_cells:
        session = session_of(metafunc.config)
        selected = session.setting("strategies").value, session.setting("precisions").value
        marker.parametrize(metafunc, read, selected, session.world_size)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Notice whether we are needed at all; and if so, let the fork server get ready while other tests run."""
    collected = list(items)
    yield
    marked_items = [item for item in items if item.get_closest_marker(_MARK) is not None]
    if marked_items:
        from pytest_distcompat.plugin.marked import marker

        marker.check_items(marked_items)
    ours = marked_items or [item for item in items if "distcompat_case" in getattr(item, "fixturenames", ())]
    if not ours or _on_rank(config):
        return
    if config.getoption("forked", False):
        from pytest_distcompat.plugin.session import FORKED

        raise pytest.UsageError(FORKED)
    config.stash[_IN_USE] = True
    config.stash[_COLLECTED] = collected
    session_of(config).collects = bool(marked_items)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Tell what the tests ask for, before xdist's controller hears that this worker has collected."""
    collected = session.config.stash.get(_COLLECTED, None)
    if collected is not None and not session.config.option.collectonly:
        from pytest_distcompat.plugin.marked import packing

        packing.announce(session_of(session.config), collected, session.items)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """What was given on the command line is part of the command that runs a test again."""
    from pytest_distcompat.plugin.reporting import reproduce

    reproduce.tell_worker(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under ``--dist load`` and ``worksteal``: tests in the order that keeps the devices busy, if there are tests of ours."""
    from pytest_distcompat.plugin.marked import packing
    from pytest_distcompat.plugin.marked.scheduling import OWN, LateScheduling

    if config.getoption("dist") not in OWN:
        return None
    return LateScheduling(config, log, functools.partial(packing.plan, session_of(config)))


def pytest_runtestloop(session: pytest.Session) -> None:
    """Begin to warm up, if a test of ours will run in this process."""
    config = session.config
    will_run = _IN_USE in config.stash and not config.option.collectonly and not session.testsfailed
    if will_run and (hasattr(config, "workerinput") or not _is_controller(config)):
        session_of(config).launcher.warm_up()


def _is_controller(config: pytest.Config) -> bool:
    """Whether xdist runs the tests in other processes."""
    return getattr(config.option, "dist", "no") != "no"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ranks that live on do so for tests that follow each other."""
    if _IN_USE in item.config.stash:
        from pytest_distcompat.plugin.marked import marker

        item.stash[marker.NEXT] = nextitem
        marker.retire_for(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A marked test is run on its ranks instead of here."""
    if item.get_closest_marker(_MARK) is not None and isinstance(item, pytest.Function) and not _on_rank(item.config):
        from pytest_distcompat.plugin.marked import marker

        session_of(item.config)
        marker.take_over(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Ranks that wait for no later test leave within this one's teardown, whose error it is what goes wrong then."""
    yield
    if _IN_USE in item.config.stash:
        from pytest_distcompat.plugin.marked import marker

        marker.retire_after(item, nextitem)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Take pytest-timeout's limit over: for a process group it does not count the warm-up, and a hang shows its stacks.

    Its own timer would end our launcher and show our frames, or end the whole session. The runs of suites are shared by
    items and have ``--distcompat-timeout``. https://github.com/pytest-dev/pytest-timeout#extending-pytest-timeout-with-plugins
    """
    if item.get_closest_marker(_MARK) is not None:
        from pytest_distcompat.plugin.marked.marker import TIME_LIMIT

        item.stash[TIME_LIMIT] = settings.timeout
        return True
    return True if "distcompat_case" in getattr(item, "fixturenames", ()) else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the ranks said, not our own frames; let a verdict travel with its report."""
    report = yield
    if item.get_closest_marker(_MARK) is not None and not _on_rank(item.config):
        from pytest_distcompat.plugin.marked import marker

        marker.finish_report(item, call, report)
    elif call.when == "call" and "distcompat_case" in getattr(item, "fixturenames", ()):
        from pytest_distcompat.plugin.suite import cases

        cases.finish_report(item, call, report)
    elif call.when == "call" and call.excinfo is not None and "distcompat" in getattr(item, "fixturenames", ()):
        from pytest_distcompat.plugin import scripted

        scripted.finish_report(report, call.excinfo.value)
    if call.when == "call" and item.config.stash.get(_WEIGHS, False):
        from pytest_distcompat.plugin import declared

        declared.weigh(item, report, hard=call.excinfo is not None and declared.is_hard(call.excinfo.value))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Nothing of ours outlives the session."""
    if "pytest_distcompat.plugin.session" in sys.modules:
        from pytest_distcompat.plugin.session import SESSION

        found = session.config.stash.get(SESSION, None)
        if found is not None:
            found.close()
