"""pytest's session on a rank: collected in the fork server, then one item is run on all ranks."""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import difflib
import functools
import inspect
import json
import math
import os
import pickle
import shlex
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat import clock, decode
from pytest_distcompat.events import Done, Error, Event, Excused, Resumed, of_kind
from pytest_distcompat.plugin.marked.phase import Phase, Phases, mark_exception
from pytest_distcompat.plugin.on_ranks import launched
from pytest_distcompat.plugin.on_ranks.launched import ON_RANK, SHARED, WORLD
from pytest_distcompat.plugin.on_ranks.rank_output import capturing, fault_handler, no_terminal
from pytest_distcompat.world import World

if TYPE_CHECKING:
    from pytest_distcompat.launch.at_import import Watch
    from pytest_distcompat.launch.rank_log import RankLog

COLLECT = f"{__name__}:collect"
RUN = f"{__name__}:run"

#: The variable with the directory in which pytest makes its temporary directories.
_ROOT = "PYTEST_DEBUG_TEMPROOT"

#: Seconds that a rank which skipped or xfailed waits for the others in a run started by hand, which
#: no parent supervises.
WAIT_BY_HAND_S = 5.0

#: Values of options that print through the terminal plugin or write files, for ranks that do not
#: report.
OF_RANK_ZERO: dict[str, Any] = {
    **dict.fromkeys(("setupshow", "setuponly", "setupplan", "debug"), False),
    # Report files that pytest and well-known plugins open, some already when they are configured.
    **dict.fromkeys(("xmlpath", "pastebin", "report_log", "htmlpath", "allure_report_dir"), None),
    "log_file": os.devnull,  # None would leave the ini key in force
}

#: Values of options that only the parent applies: they select by earlier sessions, distribute,
#: debug or write files. Only those whose plugin is there are set. -m and -k stay: a conftest may
#: read them to decide what to skip.
_OPTIONS_ON_RANKS: dict[str, Any] = {
    **OF_RANK_ZERO,
    **dict.fromkeys(
        ("lf", "failedfirst", "newfirst", "stepwise", "stepwise_skip", "stepwise_reset"), False
    ),
    **dict.fromkeys(
        ("collectonly", "usepdb", "trace", "looponfail", "distload", "json_report", "cacheclear"),
        False,
    ),
    **dict.fromkeys(("deselect", "basetemp", "durations", "numprocesses", "maxprocesses"), None),
    **dict.fromkeys(("distcompat_report", "distcompat_baseline", "distcompat_shard"), None),
    "maxfail": None,
    "dist": "no",
    "tx": [],
    "no_cov": True,
}

#: Registered names of plugins that only the parent runs: they repeat tests, or decide by tests that
#: ran before. A rank that repeats a test alone has lost its peers, and no other test has run on its
#: ranks. Under xdist pytest-rerunfailures starts a thread when it is configured, after which the
#: process cannot be forked from.
_PLUGINS_OF_THE_PARENT = ("rerunfailures", "flaky", "pytest-retry", "dependency")


def describe(config: pytest.Config) -> dict[str, Any]:
    """Return plain data from which ``collect`` makes the same session in another process.

    Raises:
        pytest.UsageError: An option has a value that cannot be handed to another process.
    """
    # Values of built-in types, and pickled ones of any other type, which a conftest.py may define.
    values, objects = {}, {}
    for name, value in vars(config.option).items():
        if _is_builtin(value):
            values[name] = value
            continue
        try:
            objects[name] = base64.b64encode(pickle.dumps(value)).decode()
        except Exception as error:
            if not _is_default(config, name, value):
                raise pytest.UsageError(
                    f"the option {name!r} has a value that cannot be handed to ranks: "
                    f"{value!r:.200} "
                    f"({type(error).__name__}: {error}); expected one that can be pickled"
                ) from None
    workerinput = getattr(config, "workerinput", {})
    worker = {name: value for name, value in workerinput.items() if isinstance(value, (str, int))}
    return {
        "options": base64.b64encode(pickle.dumps(values)).decode(),
        "objects": objects,
        "args": [str(argument) for argument in config.args],
        "argv": list(sys.argv),
        "given": [str(argument) for argument in config.invocation_params.args],
        "worker": worker,
        "cwd": str(config.invocation_params.dir),
        "markers": list(config.getini("markers")),
        "files": list(config.getini("python_files")),
    }


def _is_builtin(value: object) -> bool:
    """Tell whether a value consists of built-in types: unpickling it imports nothing."""
    kind = type(value)
    if isinstance(value, (list, tuple, set)):
        return kind in {list, tuple, set} and all(map(_is_builtin, value))
    if isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
        return kind is dict and all(map(_is_builtin, parts))
    return kind in {str, int, float, bool, bytes, type(None)}


def _is_default(config: pytest.Config, name: str, value: object) -> bool:
    """Tell whether an option has its default, which it then has on ranks too.

    argparse converts a default that is a string anew each time, so that identity does not tell.
    ``Config._parser`` is private; ``tests/plugin/test_private_names.py`` fails when it goes away.
    """
    parse = config._parser.parse_known_args  # noqa: SLF001 - see the docstring
    default = getattr(parse([]), name, None)
    if value is default or type(value) is not type(default):
        return value is default
    from_environment = os.environ.get("PYTEST_ADDOPTS", "")
    given = [*config.getini("addopts"), *shlex.split(from_environment)]
    given += map(str, config.invocation_params.args)
    unset = object()
    namespace = parse(given, argparse.Namespace(**{name: unset}))
    return getattr(namespace, name, None) is unset


def own_files(config: pytest.Config) -> tuple[str, ...]:
    """Return the installed files of the project under test (``pip install .``).

    They count as the user's own code.
    """
    import importlib.metadata

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        text = (config.rootpath / "pyproject.toml").read_text(encoding="utf-8")
        project = tomllib.loads(text)["project"]
        files = importlib.metadata.distribution(project["name"]).files or ()
    except (OSError, ValueError, LookupError, TypeError, importlib.metadata.PackageNotFoundError):
        return ()
    modules = []
    for file in files:
        if file.suffix == ".py":
            modules.append(str(file.locate()))
    return tuple(modules)


def _read_options(payload: Mapping[str, Any], *, by_hand: bool) -> dict[str, Any]:
    """Return the values of options whose types are built-in, as a rank needs them."""
    options: dict[str, Any] = pickle.loads(base64.b64decode(payload["options"]))
    for name, value in _OPTIONS_ON_RANKS.items():
        if name in options:
            options[name] = value
    if by_hand:
        options["capture"] = "no"
    # Positional arguments are passed separately; argparse warns of those that are set as values.
    options.pop("file_or_dir", None)
    return options


def _set_objects(config: pytest.Config, payload: Mapping[str, Any]) -> None:
    """Set the options whose types are not built-in.

    Such a type may be from a conftest.py, which pytest must have imported in its own way before.
    """
    for name, value in payload["objects"].items():
        try:
            setattr(config.option, name, pickle.loads(base64.b64decode(value)))
        except Exception as error:
            raise pytest.UsageError(
                f"the option {name!r} has a value that no rank can read "
                f"({type(error).__name__}: {error}); "
                "expected one that can be pickled and read again"
            ) from error


def collect(payload: Mapping[str, Any], *, by_hand: bool = False) -> pytest.Session:
    """Collect the whole session, so that single items can run after a fork.

    Options are set as values, not by a command line (``Config.fromdictargs``, made for
    subprocesses). To other plugins a rank of an xdist worker looks like that worker; any other rank
    looks like pytest without a terminal. If it posed as a worker, plugins would break that expect
    data from their half in the controller (pytest-randomly, pytest-cov).

    Args:
        payload: The return value of ``describe``.
        by_hand: Whether a user runs the ranks from a terminal, perhaps with a debugger; then no
            output is captured.
    """
    os.chdir(payload["cwd"])
    sys.argv[:] = payload["argv"]
    options = _read_options(payload, by_hand=by_hand)
    # The fork server imports libraries on purpose before pytest can rewrite the plugins among them
    # (anyio).
    quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    from _pytest.assertion.rewrite import AssertionRewritingHook

    from pytest_distcompat.launch import at_import

    watch = at_import.active
    arguments = ["-p", "no:terminal", *quiet, *payload["args"]]
    if watch is None:
        config = pytest.Config.fromdictargs(options, arguments)
    else:
        # Hooks may run in here already, and hook calls can be monitored only once there is a
        # configuration.
        with watch.hook("a conftest.py"):
            watch.watch_loader(AssertionRewritingHook, ("conftest.py", *payload["files"]))
            config = pytest.Config.fromdictargs(options, arguments)
        _watch_hooks(config, watch)
    # A conftest may read options from the arguments.
    config.invocation_params = dataclasses.replace(
        config.invocation_params, args=tuple(payload["given"])
    )
    _set_objects(config, payload)
    if payload["worker"]:
        config.workerinput = dict(payload["worker"])  # type: ignore[attr-defined]
    config.stash[ON_RANK] = True
    no_terminal(config)
    launched.hide_from_children()
    # Only now: their options and ini keys are registered, and the payload has their markers.
    for name in _PLUGINS_OF_THE_PARENT:
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
    for line in payload["markers"]:
        config.addinivalue_line("markers", line)
    session = _collected(config)
    if watch is not None:
        watch.only_in({str(item.path) for item in session.items})
    return session


#: Hooks that are called once a session, so that checking what a function left open costs little.
_ONCE = frozenset(
    {"pytest_configure", "pytest_sessionstart", "pytest_collection", "pytest_collection_finish"}
) | {"pytest_collection_modifyitems"}


def _is_lazy(mark: pytest.Mark) -> bool:
    """Tell whether a mark makes values or ids of parameters only while tests are collected."""
    if mark.name != "parametrize":
        return False
    made_at_once = (list, tuple, set, frozenset, dict, range, str, type(None))
    argvalues = (*mark.args[1:2], mark.kwargs.get("argvalues"))
    for value in (*argvalues, mark.kwargs.get("ids")):
        if not isinstance(value, made_at_once):
            return True
    return False


def _watch_hooks(config: pytest.Config, watch: Watch) -> None:
    """Watch hooks of the user's own plugins, most of all of conftest.py files."""
    hooks = _WatchedHooks(watch)
    watch.undo.callback(config.pluginmanager.add_hookcall_monitoring(hooks.before, hooks.after))


class _WatchedHooks:
    """Monitor of pluggy's hook calls that has the watch look at those of the user's own functions.

    Args:
        watch: Looks at what such a call does to the process.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        #: What is undone when each hook call that runs has ended; that of the innermost call is
        #: last.
        self._running: list[contextlib.ExitStack] = []

    def before(
        self, name: str, implementations: Sequence[Any], arguments: Mapping[str, Any]
    ) -> None:
        """Begin a hook call: the first half of ``add_hookcall_monitoring``."""
        own = []
        for implementation in implementations:
            if self._is_own(implementation.function):
                own.append(implementation)
        call = contextlib.ExitStack()
        if own or self._calls_own(name, arguments):
            call.enter_context(self._watch.hook(name))
        if name in _ONCE:
            for implementation in own:
                self._watch_alone(name, implementation, call)
        self._running.append(call)

    def after(self, *_: Any) -> None:
        """End a hook call."""
        self._running.pop().close()

    def _is_own(self, function: Any) -> bool:
        code = getattr(inspect.unwrap(function), "__code__", None)
        return code is not None and self._watch.is_own(code.co_filename)

    def _calls_own(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """Tell whether pytest's own function for that hook calls one of the user."""
        if name == "pytest_make_collect_report":
            return self._is_own(type(arguments["collector"]).collect)
        return name == "pytest_generate_tests" and any(
            map(_is_lazy, arguments["metafunc"].definition.iter_markers())
        )

    def _watch_alone(self, name: str, implementation: Any, call: contextlib.ExitStack) -> None:
        """Watch one implementation by itself until the hook call ends, unless it wraps others."""
        if implementation.wrapper or implementation.hookwrapper:
            return
        function = implementation.function
        call.callback(setattr, implementation, "function", function)

        def watched(*arguments: Any) -> Any:
            with self._watch.hook(name, alone=True):
                return function(*arguments)

        implementation.function = watched


def _collected(config: pytest.Config) -> pytest.Session:
    """Configure and collect, as ``pytest.main`` does before it runs tests.

    The global capture is stopped: forked ranks would share its temporary file.
    ``Config._do_configure``, ``_ensure_unconfigure`` and the class of the capture manager are
    private; ``tests/plugin/test_private_names.py`` fails when they change.
    """
    from pytest_distcompat.launch import preload

    errors = CollectionErrors()
    config.stash[_COLLECTION_ERRORS] = errors
    config.pluginmanager.register(errors)
    config._do_configure()  # noqa: SLF001 - see the docstring
    preload.finishing = config._ensure_unconfigure  # noqa: SLF001 - see the docstring
    session = pytest.Session.from_config(config)
    config.hook.pytest_sessionstart(session=session)
    config.hook.pytest_collection(session=session)
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.stop_global_capturing()
    return session


class CollectionErrors:
    """Plugin that remembers what a rank could not collect, which no terminal shows."""

    def __init__(self) -> None:
        #: By node id, pytest's own words for the error.
        self.texts: dict[str, str] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember a module that raised, for example."""
        if report.failed:
            self.texts[report.nodeid] = report.longreprtext

    def text_about(self, nodeid: str) -> str:
        """Return the error of the module or class that has that item; empty if it was collected."""
        for collector, text in self.texts.items():
            if nodeid.startswith(f"{collector}::"):
                return text
        return ""


_COLLECTION_ERRORS: pytest.StashKey[CollectionErrors] = pytest.StashKey()


@dataclasses.dataclass(frozen=True)
class ItemPayload:
    """The payload of the request for one item.

    Attributes:
        device: ``cpu`` or ``cuda``.
        session: A file with the return value of ``describe``.
        shared: On several machines the directory that has what they share; empty where
            ``directory`` has it.
        plain: Whether the item must not see the variable with this rank's temporary directory.
    """

    nodeid: str
    device: str
    directory: str
    world_size: int
    session: str
    shared: str = ""
    plain: bool = False


decode.prepare(ItemPayload)


def run(payload: Mapping[str, Any], log: RankLog) -> None:
    """Run one item on this rank, and write its phases to the log.

    The payload is an ``ItemPayload`` as plain data.
    """
    item_payload = decode.decode(ItemPayload, payload)
    item = find_item(collected_session(item_payload, log), item_payload.nodeid)
    with reporting(item, item_payload, log, Path(item_payload.directory)):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        # An error of a plugin in it fails the test.
        item.config._ensure_unconfigure()  # noqa: SLF001 - see _collected


def collected_session(payload: ItemPayload, log: RankLog) -> pytest.Session:
    """Return the session of this rank, which it collects now unless it was forked with one."""
    from pytest_distcompat.launch import preload

    if preload.collected is None:
        description = json.loads(Path(payload.session).read_text(encoding="utf-8"))
        preload.collected = collect(description, by_hand=log.by_hand)
    session: pytest.Session = preload.collected
    return session


@contextlib.contextmanager
def reporting(
    item: pytest.Item, payload: ItemPayload, log: RankLog, process_directory: Path
) -> Iterator[None]:
    """Have what pytest runs in the block reported to the log, as that item.

    Args:
        item: The item.
        payload: The payload of the request.
        log: The log of this rank.
        process_directory: Where this process captures output and has temporary directories. pytest
            makes its base temporary directory once in a process.
    """
    directory = Path(payload.directory)
    config = item.config
    world = config.stash[WORLD] = World.from_environment(payload.device)
    if world.divides_memory:
        import torch

        # Also for a test without the fixture process_group, whose trainer makes its group itself.
        world.divide_memory_once_used(torch)
    shared = "shared"
    if log.by_hand:
        # It repeats an earlier run, whose files may still be in the directory.
        shared = f"shared-{os.environ['TORCHELASTIC_RUN_ID']}"
    config.stash[SHARED] = Path(payload.shared or directory, shared)
    _Reporter.of(config).begin(log, payload.world_size, directory)
    fault_handler(config)
    root = process_directory / f"tmp-{log.rank}"
    own_directory = _made_in(root, config) if payload.plain else _own_temporary_directory(root)
    with own_directory, capturing(config, process_directory, log.rank):
        yield


@functools.cache
def items_of(session: pytest.Session) -> Mapping[str, pytest.Item]:
    """Return the items by their node ids. Cached: a rank may look several of them up."""
    return {item.nodeid: item for item in session.items}


def find_item(session: pytest.Session, nodeid: str) -> pytest.Item:
    """Return the item of a session. Raises LookupError if there is none."""
    items = items_of(session)
    if nodeid not in items:
        error = session.config.stash[_COLLECTION_ERRORS].text_about(nodeid)
        if error:
            path, _, _ = nodeid.partition("::")
            last_line = error.splitlines()[-1].removeprefix("E").strip()
            raise LookupError(f"{path} cannot be collected on this rank: {last_line}\n\n{error}")
        close = difflib.get_close_matches(nodeid, items, n=3)
        hint = f"; close to it: {', '.join(close)}" if close else ""
        raise LookupError(
            f"this rank collected no item {nodeid!r} ({len(items)} others{hint}). "
            "Collection must not depend on the process: no random or time-dependent parameters, "
            "no plugin that exists in one process only"
        )
    return items[nodeid]


@contextlib.contextmanager
def _own_temporary_directory(root: Path) -> Iterator[None]:
    """Have pytest make ``tmp_path`` in that directory: ranks must not remove each other's.

    https://docs.pytest.org/en/stable/reference/reference.html#envvar-PYTEST_DEBUG_TEMPROOT
    """
    root.mkdir(exist_ok=True)
    original = os.environ.get(_ROOT)
    os.environ[_ROOT] = str(root)
    yield
    os.environ.pop(_ROOT, None)  # the test may have removed it
    if original is not None:
        os.environ[_ROOT] = original


@contextlib.contextmanager
def _made_in(root: Path, config: pytest.Config) -> Iterator[None]:
    """Have pytest make its base directory there now, and show the test the variable as it was.

    ``tests/plugin/test_private_names.py`` fails when the factory's private name goes away.
    """
    with _own_temporary_directory(root):
        # Without pytest's plugin tmpdir there is none.
        factory = getattr(config, "_tmp_path_factory", None)
        if factory is not None:
            factory.getbasetemp()
    yield


class _Reporter:
    """Writes the phases of the item to the rank's log, and ends the rank at the first failure.

    A rank that failed runs no teardown: fixtures of distributed tests would wait there for peers
    that are not in a teardown.
    """

    _NAME = "distcompat-rank"
    _rank: Any
    _rank_log: Any

    @classmethod
    def of(cls, config: pytest.Config) -> _Reporter:
        """Return the reporter of this process, which is registered once: that takes a while."""
        manager = config.pluginmanager
        if not manager.has_plugin(cls._NAME):
            manager.register(cls(), cls._NAME)
        reporter = manager.get_plugin(cls._NAME)
        assert isinstance(reporter, cls)
        return reporter

    def begin(self, log: RankLog, world_size: int, directory: Path) -> None:
        """Report to that log from now on, for a request on so many ranks in that directory."""
        # Imported before the test runs, which may break imports (sys.path, sys.meta_path).
        from pytest_distcompat.launch import rank, rank_log

        self.log = log
        self.phases = Phases()
        self.world_size = world_size
        self.directory = directory
        self._rank = rank
        self._rank_log = rank_log

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note what the exception is."""
        report = yield
        mark_exception(report, call, item.config.rootpath)
        if report.failed and call.excinfo is not None:
            self._rank.debug(self.log, call.excinfo.value)
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        phase = self.phases.of(report)
        self.log.write(phase)
        if phase.ending is None:
            return
        kind, message = phase.ending
        if phase.outcome == "failed" or not self._wait_for_others(kind, message, phase):
            self.log.write(Error(kind, message, phase.text, lost=phase.lost))
            self._rank.leave_failed(self.directory, self.world_size)

    def _wait_for_others(self, kind: str, message: str, phase: Phase) -> bool:
        """Wait for the other ranks' outcomes; return whether all ranks go on to their teardowns.

        This rank has skipped or xfailed. The others may do so too, or pass, or fail, within the
        time limit of the test. The parent ends the ranks when the others only wait for this one.
        """
        self.log.write(Excused(kind, message, phase.text))
        deadline = math.inf
        if self.log.by_hand:
            # There is no parent that ends the ranks.
            deadline = clock.now() + WAIT_BY_HAND_S
        own_outcome = phase.outcome
        others = list(range(self.world_size))
        others.remove(self.log.rank)
        logs = self._rank_log.LogReader(self.directory, others)
        while clock.now() < deadline:
            outcomes = set()
            for events in logs.read().values():
                outcomes.add(self._outcome_of(events, phase.when))
            if "failed" in outcomes or (own_outcome == "skipped" and "passed" in outcomes):
                return False
            if "" not in outcomes:
                compatible = {"skipped"} if own_outcome == "skipped" else {"xfailed", "passed"}
                goes_on = outcomes <= compatible
                if goes_on:
                    self.log.write(Resumed())
                return goes_on
            clock.sleep(0.02)
        return False

    @staticmethod
    def _outcome_of(events: Sequence[Event], when: str) -> str:
        """Return another rank's outcome by its events; empty while the outcome may still change.

        A rank has passed once only its teardown is left, or nothing if this rank is in its
        teardown.
        """
        phases = {}
        for phase in of_kind(Phase, events):
            if not phase.subtest:
                phases[phase.when] = phase.outcome
        for outcome in phases.values():
            if outcome in {"skipped", "xfailed"}:
                return outcome
        if of_kind(Error, events):
            return "failed"
        last_phase = "teardown" if when == "teardown" else "call"
        if of_kind(Done, events) or last_phase in phases:
            return "passed"
        return ""
