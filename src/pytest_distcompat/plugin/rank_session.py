"""The rank's side of a marked test: the session collected in the fork server, one item of it run on every rank."""

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

from pytest_distcompat import clock
from pytest_distcompat.plugin import launched, pyproject
from pytest_distcompat.plugin.outcome import Phases, mark_lost_peer
from pytest_distcompat.plugin.phase import Phase
from pytest_distcompat.plugin.rank_output import capturing, fault_handler, no_terminal
from pytest_distcompat.world import World

if TYPE_CHECKING:
    from pytest_distcompat.launch import RankLog
    from pytest_distcompat.launch.at_import import Watch
    from pytest_distcompat.launch.serving import Kept

COLLECT = f"{__name__}:collect"
RUN = f"{__name__}:run"

#: Set in the configuration of a session that runs inside ranks.
ON_RANK: pytest.StashKey[bool] = pytest.StashKey()
WORLD: pytest.StashKey[World] = pytest.StashKey()
SHARED: pytest.StashKey[Path] = pytest.StashKey()

#: Below which directory pytest makes its temporary directories.
_ROOT = "PYTEST_DEBUG_TEMPROOT"

#: How long a rank that skipped, or failed as expected, waits for the others where nobody watches over them, in seconds.
BY_HAND = 5.0

#: Options that print through the terminal plugin, or write files: not for ranks that do not report.
OF_RANK_ZERO: dict[str, Any] = {
    **dict.fromkeys(("setupshow", "setuponly", "setupplan", "debug"), False),
    # Report files that pytest and its better-known plugins open, some already when they are configured.
    **dict.fromkeys(("xmlpath", "pastebin", "report_log", "htmlpath", "allure_report_dir"), None),
    "log_file": os.devnull,  # without the option the ini key holds
}

#: Options that select by earlier runs, distribute, debug or write files: the parent's business. Only those that a plugin is
#: there for are set. What -m and -k say stays: a conftest may decide by it what is to be skipped.
_PARENTS: dict[str, Any] = {
    **OF_RANK_ZERO,
    **dict.fromkeys(("lf", "failedfirst", "newfirst", "stepwise", "stepwise_skip", "stepwise_reset"), False),
    **dict.fromkeys(("collectonly", "usepdb", "trace", "looponfail", "distload", "json_report", "cacheclear"), False),
    **dict.fromkeys(("deselect", "basetemp", "durations", "numprocesses", "maxprocesses"), None),
    **dict.fromkeys(("distcompat_report", "distcompat_baseline"), None),
    "maxfail": 0,
    "dist": "no",
    "tx": [],
    "no_cov": True,
}

#: Plugins that repeat tests, or decide by what ran before, by the names under which they are registered: the parent's business
#: too. A rank that repeats a test alone has lost its peers, and before a test nothing has run on its ranks. Beside xdist
#: pytest-rerunfailures starts a thread when it is configured, with which nothing could be forked.
_OF_THE_PARENT = ("rerunfailures", "flaky", "pytest-retry", "dependency")


def describe(config: pytest.Config) -> dict[str, Any]:
    """Return plain data from which ``collect`` makes the same session in another process.

    Raises:
        pytest.UsageError: An option has a value that cannot be handed to another process.
    """
    plain, objects = {}, {}
    for name, value in vars(config.option).items():
        if _is_plain(value):
            plain[name] = value
            continue
        try:
            objects[name] = base64.b64encode(pickle.dumps(value)).decode()
        except Exception as error:
            if not _is_default(config, name, value):
                raise pytest.UsageError(
                    f"the option {name!r} has a value that cannot be handed to ranks: {value!r:.200} "
                    f"({type(error).__name__}: {error}); expected one that can be pickled"
                ) from None
    worker = {
        name: value for name, value in getattr(config, "workerinput", {}).items() if isinstance(value, (str, int))
    }
    return {
        "options": base64.b64encode(pickle.dumps(plain)).decode(),
        "objects": objects,
        "args": [str(argument) for argument in config.args],
        "argv": list(sys.argv),
        "given": [str(argument) for argument in config.invocation_params.args],
        "worker": worker,
        "cwd": str(config.invocation_params.dir),
        "markers": list(config.getini("markers")),
        "files": list(config.getini("python_files")),
    }


def _is_plain(value: object) -> bool:
    """Return whether a value is made of Python's own types alone, for which no module of the user's has to be imported."""
    if isinstance(value, (list, tuple, set)):
        return type(value) in {list, tuple, set} and all(map(_is_plain, value))
    if isinstance(value, dict):
        return type(value) is dict and all(_is_plain(one) for pair in value.items() for one in pair)
    return type(value) in {str, int, float, bool, bytes, type(None)}


def _is_default(config: pytest.Config, name: str, value: object) -> bool:
    """Return whether an option has its default, which it has on ranks too: nobody gave it, and no hook set it.

    A default that is a text is converted each time anew, so that it is not the same object.
    """
    default = _default(config, name)
    if value is default or type(value) is not type(default):
        return value is default
    given = [*config.getini("addopts"), *shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))]
    given += map(str, config.invocation_params.args)
    unset = object()
    return _default(config, name, given, argparse.Namespace(**{name: unset})) is unset


def _default(
    config: pytest.Config, name: str, given: Sequence[str] = (), before: argparse.Namespace | None = None
) -> object:
    """Return the value of an option where these arguments are given; without any its default.

    The parser is private to the configuration; ``tests/plugin/test_private_names.py`` says when it goes away.
    """
    return getattr(config._parser.parse_known_args([*given], before), name, None)  # noqa: SLF001 - see the docstring


def own_files(config: pytest.Config) -> tuple[str, ...]:
    """Return the files of the project under test that are installed, as ``pip install .`` does it: its code is the user's own."""
    import importlib.metadata

    try:
        files = importlib.metadata.distribution(pyproject.project_name(config)).files or ()
    except (ValueError, importlib.metadata.PackageNotFoundError):
        return ()
    return tuple(str(file.locate()) for file in files if file.suffix == ".py")


def collect(payload: Mapping[str, Any], *, by_hand: bool = False) -> pytest.Session:
    """Collect the whole session, ready to run single items after a fork.

    ``by_hand``: somebody looks at a terminal, perhaps through a debugger, from which no output may be kept.

    Options come as values, not as a command line (``Config.fromdictargs``, made for subprocesses). A rank of an xdist
    worker looks like that worker to other plugins; any other looks like a plain pytest without terminal. To pretend to
    be a worker would break plugins that had their controller's half send them something (pytest-randomly, pytest-cov).
    """
    os.chdir(payload["cwd"])
    sys.argv[:] = payload["argv"]
    options = pickle.loads(base64.b64decode(payload["options"]))
    options |= {name: value for name, value in _PARENTS.items() if name in options}
    if by_hand:
        options["capture"] = "no"
    # The arguments, which are given apart; argparse warns of positional ones that come as values.
    options.pop("file_or_dir", None)
    # The fork server imports libraries before pytest can rewrite the plugins among them (anyio): that is as it should be.
    quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    from _pytest.assertion.rewrite import AssertionRewritingHook

    from pytest_distcompat.launch import at_import

    watch = at_import.active
    # Hooks may run in this one, and pytest cannot be told of them before it has a configuration.
    with watch.hook("a conftest.py") if watch is not None else contextlib.nullcontext():
        if watch is not None:
            watch.watch_loader(AssertionRewritingHook, ("conftest.py", *payload["files"]))
        config = pytest.Config.fromdictargs(options, ["-p", "no:terminal", *quiet, *payload["args"]])
    if watch is not None:
        _watch_hooks(config, watch)
    # What a conftest may look for an option in.
    config.invocation_params = dataclasses.replace(config.invocation_params, args=tuple(payload["given"]))
    for name, value in payload["objects"].items():
        # Now: its type may be from a conftest.py, which pytest imports in its own way.
        try:
            setattr(config.option, name, pickle.loads(base64.b64decode(value)))
        except Exception as error:
            raise pytest.UsageError(
                f"the option {name!r} has a value that no rank can read ({type(error).__name__}: {error}); "
                "expected one that can be pickled and read again"
            ) from error
    if payload["worker"]:
        config.workerinput = dict(payload["worker"])  # type: ignore[attr-defined]
    config.stash[ON_RANK] = True
    no_terminal(config)
    launched.hide()
    # Their options and ini keys are known, their marks are told by the parent.
    for name in _OF_THE_PARENT:
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
    for line in payload["markers"]:
        config.addinivalue_line("markers", line)
    session = _collected(config)
    if watch is not None:
        watch.only_in({str(item.path) for item in session.items})
    return session


#: Hooks that are called once a session, so that it costs little to look what a function left open.
_ONCE = frozenset({"pytest_configure", "pytest_sessionstart", "pytest_collection", "pytest_collection_finish"}) | {
    "pytest_collection_modifyitems"
}


def _is_lazy(mark: pytest.Mark) -> bool:
    """Return whether a mark has values or ids of parameters that are made only while tests are collected."""
    if mark.name != "parametrize":
        return False
    values = (*mark.args[1:2], mark.kwargs.get("argvalues"), mark.kwargs.get("ids"))
    return any(not isinstance(one, (list, tuple, set, frozenset, dict, range, str, type(None))) for one in values)


def _watch_hooks(config: pytest.Config, watch: Watch) -> None:
    """Watch the hooks of the user's own plugins, conftest.py files above all."""

    def is_own(function: Any) -> bool:
        code = getattr(inspect.unwrap(function), "__code__", None)
        return code is not None and watch.is_own(code.co_filename)

    def calls_own(name: str, arguments: Mapping[str, Any]) -> bool:
        """Return whether pytest's own function for that hook calls one of the user's."""
        if name == "pytest_make_collect_report":
            return is_own(type(arguments["collector"]).collect)
        return name == "pytest_generate_tests" and any(map(_is_lazy, arguments["metafunc"].definition.iter_markers()))

    def watched(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            with watch.function(name):
                return function(*arguments)

        return call

    def before(name: str, implementations: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        own = [one for one in implementations if is_own(one.function)]
        block = contextlib.ExitStack()
        if own or calls_own(name, arguments):
            block.enter_context(watch.hook(name))
        for one in own if name in _ONCE else ():
            if not (one.wrapper or one.hookwrapper):
                block.callback(setattr, one, "function", one.function)
                one.function = watched(name, one.function)
        running.append(block)

    def after(*_: Any) -> None:
        running.pop().close()

    running: list[contextlib.ExitStack] = []
    watch.at_end(config.pluginmanager.add_hookcall_monitoring(before, after))


def _collected(config: pytest.Config) -> pytest.Session:
    """Configure and collect, as ``pytest.main`` does before it runs tests.

    ``Config._do_configure`` and ``_ensure_unconfigure`` are private, and the global capture is stopped through the capture
    manager, whose class is: a fork would share its temporary file between ranks. ``tests/plugin/test_private_names.py`` says
    when they change.
    """
    from pytest_distcompat.launch import preload

    config._do_configure()  # noqa: SLF001 - see the docstring
    preload.finishing = config._ensure_unconfigure  # noqa: SLF001 - see the docstring
    session = pytest.Session.from_config(config)
    config.hook.pytest_sessionstart(session=session)
    config.hook.pytest_collection(session=session)
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.stop_global_capturing()
    return session


def run(payload: Mapping[str, Any], log: RankLog) -> None:
    """Run one item on this rank.

    ``payload``: ``nodeid``; ``next``, the item that these ranks run thereafter, or None; ``device``, ``directory``,
    ``session``, the file with what ``describe`` gave.
    """
    from pytest_distcompat.launch import preload, serving

    if preload.collected is None:
        preload.collected = collect(
            json.loads(Path(payload["session"]).read_text(encoding="utf-8")), by_hand=log.by_hand
        )
        if serving.kept is not None:
            serving.kept.settle()
    items = _items(preload.collected)
    item = _find(items, payload["nodeid"])
    following = items.get(payload["next"])
    if serving.kept is not None:
        _as_if_alone(serving.kept, item)
    directory = Path(payload["directory"])
    config = item.config
    config.stash[WORLD] = World.from_environment(payload["device"])
    # By hand the life was lived before, perhaps more than once: that directory may hold what it left.
    config.stash[SHARED] = directory / (f"shared-{os.environ['TORCHELASTIC_RUN_ID']}" if log.by_hand else "shared")
    _Reporter.of(config).answer(log, payload["world_size"], directory)
    fault_handler(config)
    # pytest makes its own below it once a process, which may be at any request of ranks that live on. What is captured goes to
    # files of their life too, as the agent's logs do.
    temporary = serving.kept.directory if serving.kept is not None else directory
    with _own_temporary_directory(temporary, log.rank), capturing(config, temporary, log.rank):
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if serving.kept is None:
            _finish()


def _finish() -> None:
    """Do what plugins want done at the end of a session: it is that of this rank. What goes wrong fails the test."""
    from pytest_distcompat.launch import preload

    if preload.finishing is not None:
        preload.finishing()


def _as_if_alone(kept: Kept, item: pytest.Item) -> None:
    """Before an item on ranks that live on.

    ``Session._setupstate`` is private; ``tests/plugin/test_private_names.py`` says when it goes away.
    """
    state = item.session._setupstate  # noqa: SLF001 - see the docstring
    # The item that was to come next may have been skipped by the parent.
    state.teardown_exact(item)
    if not kept.at_end:
        # The same, for items that these ranks never get to.
        kept.at_end += [_finish, lambda: state.teardown_exact(None)]
    if "process_group" not in getattr(item, "fixturenames", ()):
        # It may make its own.
        kept.without_group()


@functools.cache
def _items(session: pytest.Session) -> Mapping[str, pytest.Item]:
    """The items by their ids; once a process, for ranks that live on come back for each of them."""
    return {item.nodeid: item for item in session.items}


def _find(items: Mapping[str, pytest.Item], nodeid: str) -> pytest.Item:
    if nodeid not in items:
        close = difflib.get_close_matches(nodeid, items, n=3)
        hint = f"; close to it: {', '.join(close)}" if close else ""
        raise LookupError(
            f"this rank collected no item {nodeid!r} ({len(items)} others{hint}). Collection must not depend on the "
            "process: no random or time-dependent parameters, no plugin that exists in one process only"
        )
    return items[nodeid]


@contextlib.contextmanager
def _own_temporary_directory(directory: Path, rank: int) -> Iterator[None]:
    """tmp_path of this rank is below the life's directory: two ranks must not clean up after each other.

    https://docs.pytest.org/en/stable/reference/reference.html#envvar-PYTEST_DEBUG_TEMPROOT
    """
    root = directory / f"tmp-{rank}"
    root.mkdir(exist_ok=True)
    before = os.environ.get(_ROOT)
    os.environ[_ROOT] = str(root)
    yield
    os.environ.pop(_ROOT, None)  # the test may have emptied it
    if before is not None:
        os.environ[_ROOT] = before


class _Reporter:
    """Writes the phases of the item to the rank's log; ends the rank at the first failure.

    A rank that failed runs no teardown: fixtures of distributed tests synchronise there, with peers who are elsewhere.
    """

    _NAME = "distcompat-rank"
    log: RankLog
    phases: Phases
    world_size: int
    directory: Path
    _rank: Any
    _request: Any

    @classmethod
    def of(cls, config: pytest.Config) -> _Reporter:
        """The one of this process: pytest takes a while to register a plugin."""
        manager = config.pluginmanager
        if not manager.has_plugin(cls._NAME):
            manager.register(cls(), cls._NAME)
        found = manager.get_plugin(cls._NAME)
        assert isinstance(found, cls)
        return found

    def answer(self, log: RankLog, world_size: int, directory: Path) -> None:
        """From now on report to that log, of a request on so many ranks in that directory."""
        # Imported now: a test may take away by what modules are found.
        from pytest_distcompat.launch import rank, request

        self.log, self.phases, self.world_size, self.directory = log, Phases(), world_size, directory
        self._rank, self._request = rank, request

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note what only the exception itself can tell."""
        report = yield
        mark_lost_peer(report, call)
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        phase = self.phases.of(report)
        self.log.write("subtest" if phase.subtest else "phase", **phase.to_json())
        if phase.ending is not None and (phase.outcome == "failed" or not self._goes_on(*phase.ending, phase)):
            self._leave(*phase.ending, phase)

    def _goes_on(self, kind: str, message: str, phase: Phase) -> bool:
        """Wait for what the other ranks come to; return whether this one goes on to its teardown, as all of them do.

        It has skipped, or failed as expected. The others may do so too, or pass, or really fail, however much later: for
        that they have the test's time limit. Whoever started the ranks ends them when the others only wait for this one.
        """
        self.log.write(self._request.EXCUSED, kind=kind, message=message, text=phase.text)
        # By hand nobody else looks.
        deadline = clock.now() + BY_HAND if self.log.by_hand else math.inf
        own = phase.outcome
        others = [rank for rank in range(self.world_size) if rank != self.log.rank]
        while clock.now() < deadline:
            found = {self._state(self._request.read_events(self.directory, rank), phase.when) for rank in others}
            if "failed" in found or (own == "skipped" and "passed" in found):
                return False
            if "" not in found:
                goes_on = found <= ({"skipped"} if own == "skipped" else {"xfailed", "passed"})
                if goes_on:
                    self.log.write(self._request.RESUMED)
                return goes_on
            clock.sleep(0.02)
        return False

    @staticmethod
    def _state(events: list[dict[str, Any]], when: str) -> str:
        """Return what another rank has come to: an outcome; empty while it may still come to another one.

        It has passed once nothing but the teardown, or not even that, is to come.
        """
        phases = {event["when"]: event["outcome"] for event in events if event["event"] == "phase"}
        excused = [outcome for outcome in phases.values() if outcome in {"skipped", "xfailed"}]
        if excused:
            return str(excused[0])
        said = {event["event"] for event in events}
        if "error" in said:
            return "failed"
        return "passed" if "done" in said or ("teardown" if when == "teardown" else "call") in phases else ""

    def _leave(self, kind: str, message: str, phase: Phase) -> None:
        self.log.error(kind, message, phase.text, lost=phase.lost)
        self._rank.leave_failed(self.directory, self.world_size)
