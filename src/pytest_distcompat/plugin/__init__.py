"""Hooks of the pytest plugin: what pytest calls, and to which module each call goes.

pytest loads this module in every session in which the package is installed (entry point
``pytest11``). There are two kinds of distributed tests:

- A *marked test* has ``@pytest.mark.distcompat(world_size=2)``. It runs on *ranks*, the processes
  of a torchrun process group, and not in pytest's process. ``marked/`` does the work.
- A *suite* is a subclass of ``CompatSuite``, with an item for each check in each *cell*, such as
  ``TestMyTrainer::test[fsdp2-fp32-w2:names]``: strategy, precision and 2 ranks, then the check.
  ``suite/`` does the work.

``session_of(config)`` returns the plugin's state: settings, and the *launcher* that starts ranks.

The same hooks run in xdist's controller, in its workers, and on ranks, where pytest runs one item
again (``on_ranks/``). ``ON_RANK in config.stash`` tells that this process is a rank. The stash is
pytest's dictionary for the data of plugins.

A session without distributed tests must not pay for the plugin. Of the core it imports this file,
``hookspecs``, ``options``, ``fixtures`` and what these import at their top, nothing else. So the
other modules are imported in functions.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.missing_module import hint_of
from pytest_distcompat.plugin import options
from pytest_distcompat.plugin.current import session_of
from pytest_distcompat.plugin.marked.arguments import added_arguments
from pytest_distcompat.plugin.on_ranks.launched import COLLECTS, ON_RANK, STARTS_RANKS

if TYPE_CHECKING:
    from pytest_distcompat.plugin.session import DistcompatSession

_MARK = "distcompat"
#: Set once distributed tests were collected in this process, which is no rank.
_IN_USE: pytest.StashKey[bool] = pytest.StashKey()
#: The items in the order of collection, before any plugin changed it.
_COLLECTED: pytest.StashKey[list[pytest.Item]] = pytest.StashKey()
#: Whether this process applies the known issues that the user declares (``--distcompat-known``) to
#: its reports. A known issue is a bug of another project, for which a failure is expected.
_APPLIES_KNOWN: pytest.StashKey[bool] = pytest.StashKey()


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the hooks that extensions may implement."""
    from pytest_distcompat import hookspecs

    pluginmanager.add_hookspecs(hookspecs)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the options and ini keys, those of extensions too."""
    options.add(parser, pluginmanager)


# First, because the hooks of other plugins open report files. Before that the options are checked,
# and an extension may change them.
@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and the fixtures, and check the options before any test runs."""
    from pytest_distcompat.plugin import fixtures

    # Extensions may add arguments to the mark, such as ``reuse``.
    added = ""
    for argument in added_arguments(config):
        added += f", {argument.signature}"
    config.addinivalue_line(
        "markers",
        "distcompat(world_size=N, nodes=N, strategies=[...], precisions=[...], options=[{...}], "
        f"timeout=SECONDS{added}): "
        "run the test on every rank of a torchrun process group; "
        "with strategies, precisions or options once for each cell.",
    )
    config.pluginmanager.register(fixtures, "distcompat-fixtures")
    config.hook.pytest_distcompat_configure(config=config)
    # The options that the user has set, by command line or ini file.
    given = options.given(config)
    for name in given:
        # Reading a value checks it.
        options.setting(config, name)
    # Other sessions are made when a distributed test is collected. An xdist controller collects
    # nothing: it learns of distributed tests from the reports of its workers.
    if given or _is_controller(config):
        session = session_of(config)
        # ``session.own`` are the known issues of the user's files. On a rank no issue is applied.
        # The report of one rank is not the outcome: that is decided by the reports of all ranks, in
        # pytest's process.
        config.stash[_APPLIES_KNOWN] = bool(session.own) and ON_RANK not in config.stash
        if given:
            # Reading these properties checks the options behind them. ``verified`` is that of
            # ``--distcompat-verify``.
            _ = session.world_size, session.verified
            # ``elsewhere``: some test runs on other machines. A process that runs tests does this
            # in ``pytest_runtestloop``, when it knows them.
            if session.placement.elsewhere and _is_controller(config):
                _end_by_sigterm(config)
            # A worker of xdist writes no report: its controller does.
            if session.setting("report").value and not hasattr(config, "workerinput"):
                _end_by_sigterm(config)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return a line with the options that were set and where they were set; no line if none was.

    Example: ``distcompat: timeout 20 (from option); cpu x 2``.
    """
    names = options.given(config)
    if not names:
        return []
    session = session_of(config)
    settings = []
    for name in names:
        setting = options.setting(config, name)
        short_name = name.removeprefix("distcompat_")
        settings.append(f"{short_name} {setting.text} (from {setting.origin})")
    all_settings = ", ".join(settings)
    return [f"distcompat: {all_settings}; {session.device} x {session.world_size}"]


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Return a line with the settings of the distributed tests; nothing if there are none.

    Example: ``distcompat: CPU, gloo, world size 2 (default), time limit 300 s (default), warm
    launcher``.
    """
    if _IN_USE not in config.stash:
        return []
    from pytest_distcompat.cell import OPTIONS

    session = session_of(config)
    # An extension's substitute performs the runs, whatever devices and launcher there are.
    if session.substitute is not None:
        return [f"distcompat: {session.substitute.title}"]
    origin = session.setting("world_size").origin
    launcher = session.setting("launcher").value
    timeout_origin = session.setting("timeout").origin
    limit = f"time limit {session.timeout:g} s ({timeout_origin})"
    world_size = f"world size {session.world_size} ({origin})"
    line = f"{_devices(session)}, {world_size}, {limit}, {launcher} launcher"
    budget = session.setting("budget").value
    if budget:
        line += f", budget {budget.seconds:g} s in order @{budget.seed}"
    lines = [f"distcompat: {line}"]
    if OPTIONS["model"].default == "mlp":
        lines.append(
            "distcompat: transformers is not installed: "
            "the built-in drivers train the model mlp by default"
        )
    return lines


def _devices(session: DistcompatSession) -> str:
    """Return the devices of a session and the backends of its process groups: ``2 GPUs, nccl``."""
    if not session.gpus:
        return "CPU, gloo"
    device = f"{session.gpus} GPUs, nccl"
    if session.ranks_each > 1:
        from pytest_distcompat.launch import nccl

        backend = str(nccl.library()) if session.nccl_takes_shared_ranks else "gloo"
        device += f" ({backend} where up to {session.ranks_each} ranks share a GPU)"
    return device


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Add a hint to a failed import of a module that the repository has but pytest does not find.

    Only modules of distributed tests get one.
    """
    report = yield
    # pytest leaves the call, with the exception, on the report.
    call: Any = getattr(report, "call", None)
    if (
        not report.failed
        or not isinstance(collector, pytest.Module)
        or call is None
        or call.excinfo is None
    ):
        return report
    hint = hint_of(call.excinfo.value, collector.config.rootpath)
    # The module's tests are not known, because it was not imported. Its text tells.
    if hint and _MARK in collector.path.read_text(encoding="utf-8", errors="replace"):
        report.sections.append((f"{_MARK}: hint", hint))
    return report


def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> pytest.Class | list[pytest.Item] | None:
    """Collect a suite whatever its name is. A mistake in its class is a collection error.

    Returns:
        The collector of a suite; an empty list for a class that is only a base of suites, so that
        nothing is collected; None for anything else, which pytest then collects by its own rules.
    """
    # A module that defines a suite has imported this one; other sessions must not pay for the
    # import.
    suite = sys.modules.get("pytest_distcompat.compat_suite")
    if suite is None or not isinstance(obj, type):
        return None
    if not issubclass(obj, suite.CompatSuite):
        return None
    from pytest_distcompat.plugin.suite import suite_class
    from pytest_distcompat.plugin.suite.declared_names import check_attributes

    try:
        check_attributes(obj)
        if suite_class.is_base(obj):
            return []
        suite_class.validate(obj, session_of(collector.config).world_size)
    except UsageProblem as problem:
        raise pytest.Collector.CollectError(str(problem)) from None
    test_class: pytest.Class = pytest.Class.from_parent(collector, name=name, obj=obj)
    return test_class


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize suites by their cases, and marked tests by their cells.

    A case is one check in one cell. A marked test has cells if its mark names strategies,
    precisions or options.
    """
    mark = next(metafunc.definition.iter_markers(_MARK), None)
    if mark is not None:
        from pytest_distcompat.plugin.marked import declare

        try:
            arguments = declare.read_mark(mark, added_arguments(metafunc.config))
        except ValueError as problem:
            raise pytest.Collector.CollectError(
                f"{metafunc.definition.nodeid}: {problem}"
            ) from None
        if arguments.has_cells:
            declare.parametrize(metafunc, arguments, session_of(metafunc.config))
    elif "distcompat_case" in metafunc.fixturenames and metafunc.cls is not None:
        from pytest_distcompat.plugin.suite import cases

        try:
            cases.parametrize(metafunc, session_of(metafunc.config))
        except UsageProblem as problem:
            raise pytest.Collector.CollectError(str(problem)) from None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Deselect the tests of other shards, check marked tests, and note if any are distributed.

    A shard is the part of the tests that one of several machines runs (``--distcompat-shard 2/3``).
    """
    collected = list(items)
    # Other plugins, and -k, select and order the items.
    yield
    # A rank runs only the item of its request, wherever that is. But ranks of a launch in which
    # pytest was started by torchrun (``COLLECTS``) all select the same.
    shard = options.setting(config, "distcompat_shard").value
    if shard is not None and (ON_RANK not in config.stash or COLLECTS in config.stash):
        from pytest_distcompat.plugin.suite.order import select_shard

        select_shard(session_of(config), shard, items)
    marked = []
    of_suites = []
    for item in items:
        if item.get_closest_marker(_MARK) is not None:
            marked.append(item)
        elif _is_of_suite(item):
            of_suites.append(item)
    if marked:
        from pytest_distcompat.plugin.marked import declare

        declare.check_items(marked)
    if (marked or of_suites) and ON_RANK not in config.stash:
        _prepare_for_ranks(config, items, collected)
        # Ranks of marked tests run pytest items: they are forked from a process that has collected
        # the tests. Ranks of suites run drivers, and need no collection.
        session_of(config).collects = bool(marked)


def _is_of_suite(item: pytest.Item) -> bool:
    """Tell whether an item is a case of a CompatSuite."""
    return "distcompat_case" in getattr(item, "fixturenames", ())


def _prepare_for_ranks(
    config: pytest.Config, items: list[pytest.Item], collected: list[pytest.Item]
) -> None:
    """Prepare a session with distributed tests.

    Args:
        config: The configuration of pytest.
        items: The items that will run, which are sorted in place under ``--distcompat-budget``.
        collected: All items in the order in which they were collected.

    Raises:
        pytest.UsageError: pytest-forked would run each test in a fork of this process.
    """
    if config.getoption("forked", False):
        from pytest_distcompat.plugin.session import FORKED

        raise pytest.UsageError(FORKED)
    if session_of(config).setting("budget").value:
        from pytest_distcompat.plugin.suite import order

        order.put_in_order(items, session_of(config))
    from pytest_distcompat.plugin import packing, rank_coverage

    # Warns if coverage.py measures this process alone and not the ranks.
    rank_coverage.warn(session_of(config))
    # Notes over how many machines each test is spread.
    packing.note_spread(session_of(config), items)
    config.stash[_IN_USE] = True
    config.stash[_COLLECTED] = collected


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Write down how many ranks each test needs.

    This comes before xdist's controller learns that this worker has collected: the controller
    plans with these numbers.
    """
    collected = session.config.stash.get(_COLLECTED, None)
    if collected is not None and not session.config.option.collectonly:
        from pytest_distcompat.plugin import packing

        packing.write_demands(session_of(session.config), collected, session.items)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send the arguments of the command line to a worker of xdist, in its ``workerinput``.

    The worker gets its options as values. It needs the arguments for the command that repeats a
    test.
    """
    from pytest_distcompat.plugin.reporting.reproduce import ARGUMENTS

    node.workerinput[ARGUMENTS] = [str(argument) for argument in node.config.invocation_params.args]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler that keeps devices busy, under ``--dist load``.

    Other values of ``--dist`` order tests by their own rules.
    """
    if config.getoption("dist") != "load":
        return None
    from pytest_distcompat.plugin import packed, packing

    # ``packing.plan`` returns the tests in the order in which to hand them out to workers.
    return packed.PackedScheduling(config, log, functools.partial(packing.plan, session_of(config)))


def pytest_runtestloop(session: pytest.Session) -> None:
    """Start the fork servers, if a distributed test will run in this process."""
    config = session.config
    # After a collection error pytest runs no test.
    if _IN_USE not in config.stash or config.option.collectonly or session.testsfailed:
        return
    # The workers run the tests, not the controller.
    if _is_controller(config) and not hasattr(config, "workerinput"):
        return
    # On a full disk there is no launcher process; the tests themselves report what they cannot
    # write.
    with contextlib.suppress(OSError):
        session_of(config).launcher.warm_up()
    if session_of(config).placement.elsewhere:
        _end_by_sigterm(config)
    # An extension for several machines waits here until these have joined the session.
    problem = config.hook.pytest_distcompat_why_not_ready()
    if problem:
        raise pytest.UsageError(problem)
    if config.getoption("usepdb", False):
        from pytest_distcompat.plugin import debugging

        # Under ``--pdb`` the failure of a rank is shown otherwise than one of this process.
        debugging.take_over(config)


def _end_by_sigterm(config: pytest.Config) -> None:
    """Have SIGTERM end the session as Ctrl-C does: what ran is reported, other machines are let go.

    Schedulers send SIGTERM when the time of a job is over.
    """
    from pytest_distcompat.plugin import interruption

    interruption.install(config)


def _is_controller(config: pytest.Config) -> bool:
    """Tell whether xdist runs the tests in other processes than this one.

    In a worker, and without xdist, ``--dist`` is ``no``.
    """
    return getattr(config.option, "dist", "no") != "no"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have a marked test run on its ranks instead of in this process.

    Here only its function is replaced; the run follows when pytest calls it.
    """
    marked = item.get_closest_marker(_MARK) is not None and ON_RANK not in item.config.stash
    if marked and isinstance(item, pytest.Function):
        from pytest_distcompat.plugin.marked import run

        run.take_over(item)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Apply pytest-timeout's limit to the process group instead of this process.

    So the warm-up does not count, and a hang shows the stacks of the ranks. pytest-timeout's own
    timer would end the launcher and show frames of this plugin, or end the whole session. A limit
    for an item of a suite is ignored: several items share the runs of a suite, which have
    ``--distcompat-timeout``.
    https://github.com/pytest-dev/pytest-timeout#extending-pytest-timeout-with-plugins

    Returns:
        True if pytest-timeout must set no timer of its own; None for an ordinary test.
    """
    if item.get_closest_marker(_MARK) is not None:
        from pytest_distcompat.plugin.marked.run import TIME_LIMIT

        item.stash[TIME_LIMIT] = settings.timeout
        return True
    return True if _is_of_suite(item) else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the failure of the ranks instead of frames of this plugin.

    The verdict of a suite's item, which is passed, failed, known and so on, is attached to the
    report, so that xdist sends it to the controller.
    """
    report = yield
    _finish_report(item, call, report)
    if call.when == "call" and item.config.stash.get(_APPLIES_KNOWN, False):
        from pytest_distcompat.plugin import declared

        # A crash, a hang or a leak, which no known issue excuses.
        hard = call.excinfo is not None and declared.is_hard(call.excinfo.value)
        declared.apply_known_issues(item, report, hard=hard)
    return report


def _finish_report(
    item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
) -> None:
    """Put into a report what the ranks say.

    This concerns a marked test, a case of a suite, and an ordinary test that starts ranks itself
    (``STARTS_RANKS``), as one with the fixture for scripts does.
    """
    if item.get_closest_marker(_MARK) is not None and ON_RANK not in item.config.stash:
        from pytest_distcompat.plugin.marked import outcome

        outcome.finish_report(item, call, report)
    elif call.when != "call":
        return
    elif _is_of_suite(item):
        from pytest_distcompat.plugin.suite import run

        run.finish_report(item, call, report)
    elif call.excinfo is not None and item.stash.get(STARTS_RANKS, False):
        from pytest_distcompat.plugin import declared

        declared.take_xfail_from_hard(report, call.excinfo.value)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End every process that the plugin started.

    If the module of the session was not imported, there is no session and no process.
    """
    if "pytest_distcompat.plugin.session" in sys.modules:
        from pytest_distcompat.plugin.session import SESSION

        distcompat_session = session.config.stash.get(SESSION, None)
        if distcompat_session is not None:
            distcompat_session.close()
