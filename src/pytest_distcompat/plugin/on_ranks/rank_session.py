"""pytest's session on a rank: collected in the fork server, then one item is run on all ranks.

A test with ``@pytest.mark.distcompat(world_size=2)`` is collected by pytest as usual. But its call
in pytest's process only sends a request to the launcher (``marked.run``), which starts two *ranks*:
the processes of one torchrun process group. On each of them pytest runs the same item, with its
fixtures. Two functions of this module are called by their names, in other processes:

1. ``collect`` makes pytest's session and collects all items. The fork server, the process that
   ranks are forked from, calls it once (``launch.preload.collect``), so that ranks start with the
   session in memory. It gets what ``session_description.describe`` returned in pytest's process.
2. ``run`` runs one item. Each rank calls it (``launch.rank.perform``) with the ``payload`` of the
   request, an ``ItemPayload``, and with the rank's log. It writes the outcome to the log as events
   (``rank_reporter``). pytest's process reads the logs of all ranks after the run.

A rank is run *by hand* if a user repeats it with the ``torchrun`` command that a failure shows.
Then nothing is captured, and no launcher watches the ranks.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import difflib
import functools
import json
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat import decode
from pytest_distcompat.plugin.on_ranks import launched
from pytest_distcompat.plugin.on_ranks.launched import ON_RANK, SHARED, WORLD
from pytest_distcompat.plugin.on_ranks.rank_output import capturing, fault_handler, no_terminal
from pytest_distcompat.plugin.on_ranks.rank_reporter import RankReporter
from pytest_distcompat.plugin.on_ranks.watched_hooks import watch_hooks
from pytest_distcompat.world import World

if TYPE_CHECKING:
    from pytest_distcompat.launch.at_import import Watch
    from pytest_distcompat.launch.rank_log import RankLog

#: The two functions as ``module:function``, the form in which requests to other processes name
#: them.
COLLECT = f"{__name__}:collect"
RUN = f"{__name__}:run"

#: The variable with the directory in which pytest makes its temporary directories.
_ROOT = "PYTEST_DEBUG_TEMPROOT"

#: Option -> the value that silences it. These options print through the terminal plugin or write
#: files. All ranks of a marked test have these values, as part of ``_OPTIONS_ON_RANKS``. If pytest
#: was started by torchrun (``ext/inside``), rank 0 reports as pytest does, and the other ranks have
#: them.
SILENCING_OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("setupshow", "setuponly", "setupplan", "debug"), False),
    # Report files that pytest and well-known plugins open, some already when they are configured.
    **dict.fromkeys(("xmlpath", "pastebin", "report_log", "htmlpath", "allure_report_dir"), None),
    "log_file": os.devnull,  # None would leave the ini key in force
}

#: Option -> the value that it has on ranks, in place of the user's. Only pytest's process applies
#: these options. An option is set only if its plugin is loaded. -m and -k stay as the user gave
#: them: a conftest may read them to decide what to skip.
_OPTIONS_ON_RANKS: dict[str, Any] = {
    **SILENCING_OPTIONS,
    # They select tests by what earlier sessions have recorded, or remove that record.
    **dict.fromkeys(
        ("lf", "failedfirst", "newfirst", "stepwise", "stepwise_skip", "stepwise_reset"), False
    ),
    "cacheclear": False,
    # They are about all tests of a session: select some, or end after some.
    **dict.fromkeys(("deselect", "distcompat_shard", "maxfail"), None),
    # They run no test, or run it in a debugger.
    **dict.fromkeys(("collectonly", "usepdb", "trace"), False),
    # xdist's: they start workers.
    **dict.fromkeys(("looponfail", "distload"), False),
    **dict.fromkeys(("numprocesses", "maxprocesses"), None),
    "dist": "no",
    "tx": [],
    # They report on the session, or write into one directory for all processes.
    **dict.fromkeys(("durations", "distcompat_report", "distcompat_baseline", "basetemp"), None),
    "json_report": False,
    "no_cov": True,
}

#: Registered names of plugins that only pytest's process runs. They repeat tests: a rank that
#: repeats a test alone has lost its peers. Or they decide by tests that ran before: no other test
#: has run on these ranks. Under xdist pytest-rerunfailures starts a thread when it is configured,
#: and a process with threads cannot be forked safely.
_PLUGINS_OF_THE_PARENT = ("rerunfailures", "flaky", "pytest-retry", "dependency")


def _read_options(payload: Mapping[str, Any], *, by_hand: bool) -> dict[str, Any]:
    """Return the values of options whose types are built-in, as a rank needs them.

    The others follow later, by ``_set_objects``.

    Args:
        payload: The return value of ``describe``: ``options`` is a pickle in base64, of name ->
            value.
        by_hand: Whether a user repeats the run from a terminal.
    """
    options: dict[str, Any] = pickle.loads(base64.b64decode(payload["options"]))
    for name, value in _OPTIONS_ON_RANKS.items():
        if name in options:
            options[name] = value
    if by_hand:
        # The user looks at the terminal, perhaps in a debugger.
        options["capture"] = "no"
    # Positional arguments are passed separately; argparse warns of those that are set as values.
    options.pop("file_or_dir", None)
    return options


def _set_objects(config: pytest.Config, payload: Mapping[str, Any]) -> None:
    """Set the options whose types are not built-in.

    Such a type may be from a conftest.py, which pytest must have imported in its own way before. So
    the payload's ``objects`` has one pickle in base64 for each name.
    """
    for name, value in payload["objects"].items():
        try:
            unpickled = pickle.loads(base64.b64decode(value))
            setattr(config.option, name, unpickled)
        except Exception as error:
            raise pytest.UsageError(
                f"the option {name!r} has a value that no rank can read "
                f"({type(error).__name__}: {error}); "
                "expected one that can be pickled and read again"
            ) from error


def collect(payload: Mapping[str, Any], *, by_hand: bool = False) -> pytest.Session:
    """Collect the whole session, so that single items can run after a fork.

    Options are set as values, not by a command line (``Config.fromdictargs``, made for
    subprocesses). To other plugins a rank of an xdist worker looks like that worker, because it has
    the same ``config.workerinput``. Any other rank looks like pytest without a terminal: if it
    posed as a worker, plugins would break that expect data from their half in xdist's controller
    (pytest-randomly, pytest-cov).

    Args:
        payload: The return value of ``describe``, which explains its keys.
        by_hand: Whether a user repeats the run from a terminal, perhaps with a debugger; then no
            output is captured.
    """
    os.chdir(payload["cwd"])
    sys.argv[:] = payload["argv"]
    from pytest_distcompat.launch import at_import

    # The fork server has started a watch: it notes what the user's modules read while they are
    # imported, such as the variable RANK, whose value forked ranks would then share. It is None on
    # a rank that collects by itself: as under torchrun, it may read what it wants.
    watch = at_import.active
    config = _make_config(payload, _read_options(payload, by_hand=by_hand), watch)
    # A conftest may read options from the arguments.
    config.invocation_params = dataclasses.replace(
        config.invocation_params, args=tuple(payload["given"])
    )
    _set_objects(config, payload)
    if payload["worker"]:
        config.workerinput = dict(payload["worker"])  # type: ignore[attr-defined]
    config.stash[ON_RANK] = True
    no_terminal(config)
    # A test may start another pytest, which must not take itself for a rank.
    launched.hide_from_children()
    # Only now, and not by ``-p no:NAME``: their options and ini keys are registered, so that a
    # user's ini file with these is no error. Their markers are in the payload.
    for name in _PLUGINS_OF_THE_PARENT:
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
    for line in payload["markers"]:
        config.addinivalue_line("markers", line)
    session = _collected(config)
    if watch is not None:
        # Tests that a note of the watch concerns are not run on ranks forked from this process.
        # What a test module read concerns its own tests only; all else concerns every test. So the
        # watch is given the files that have tests.
        watch.only_in({str(item.path) for item in session.items})
    return session


def _make_config(
    payload: Mapping[str, Any], options: dict[str, Any], watch: Watch | None
) -> pytest.Config:
    """Return pytest's configuration. This imports plugins and the first conftest.py files.

    Args:
        payload: The return value of ``describe``. ``args`` are the paths and node ids to collect,
            ``files`` the patterns of test files, ``["test_*.py"]``.
        options: The values of options by name.
        watch: Looks at the conftest.py files and, from then on, at the user's hooks; None for no
            watch.
    """
    # pytest warns of plugins that are imported before it can rewrite their assertions. The fork
    # server imports libraries on purpose before, and some are plugins (anyio).
    quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    arguments = ["-p", "no:terminal", *quiet, *payload["args"]]
    from _pytest.assertion.rewrite import AssertionRewritingHook

    if watch is None:
        return pytest.Config.fromdictargs(options, arguments)
    # ``fromdictargs`` imports conftest.py files, whose hooks may run at once. Single hook calls can
    # be monitored only once there is a configuration, so all of them are watched as one.
    with watch.hook("a conftest.py"):
        watch.watch_loader(AssertionRewritingHook, ("conftest.py", *payload["files"]))
        config = pytest.Config.fromdictargs(options, arguments)
    watch_hooks(config, watch)
    return config


def _collected(config: pytest.Config) -> pytest.Session:
    """Configure and collect, as ``pytest.main`` does before it runs tests.

    ``Config._do_configure``, ``_ensure_unconfigure`` and the class of the capture manager are
    private; ``tests/plugin/test_private_names.py`` fails when they change.
    """
    from pytest_distcompat.launch import preload

    errors = CollectionErrors()
    config.stash[_COLLECTION_ERRORS] = errors
    config.pluginmanager.register(errors)
    config._do_configure()  # noqa: SLF001 - see the docstring
    # The fork server calls it when it ends, so that plugins are unconfigured there too.
    preload.finishing = config._ensure_unconfigure  # noqa: SLF001 - see the docstring
    session = pytest.Session.from_config(config)
    config.hook.pytest_sessionstart(session=session)
    config.hook.pytest_collection(session=session)
    # Forked ranks would share the temporary file of pytest's capture. Each starts its own.
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.stop_global_capturing()
    return session


class CollectionErrors:
    """pytest plugin that remembers what could not be collected, for ``find_item``'s error.

    No terminal of this process shows it.
    """

    def __init__(self) -> None:
        #: Node id of a module or class -> pytest's text for the error, a traceback mostly.
        self.texts: dict[str, str] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember the error of a module that cannot be imported, for example."""
        if report.failed:
            self.texts[report.nodeid] = report.longreprtext

    def text_about(self, nodeid: str) -> str:
        """Return the error of the module or class that has that item; empty if it was collected."""
        for collector, text in self.texts.items():
            if nodeid.startswith(f"{collector}::"):
                return text
        return ""


#: Where the configuration of a rank's session has its ``CollectionErrors``.
_COLLECTION_ERRORS: pytest.StashKey[CollectionErrors] = pytest.StashKey()


@dataclasses.dataclass(frozen=True)
class ItemPayload:
    """The payload of the request for one item.

    ``marked.run`` makes it in pytest's process; each rank gets it as plain data.

    Attributes:
        nodeid: The item, as ``tests/test_a.py::test_sum[fsdp2-fp32-w2]``.
        device: ``cpu`` or ``cuda``.
        directory: The directory of this run, with the logs and the output of all ranks.
        world_size: The number of ranks.
        session: The path of a JSON file with the return value of ``describe``.
        shared: The directory for what all ranks share. It is set for ranks on several machines,
            each of which has a ``directory`` of its own; empty if ``directory`` is the place.
        plain: Whether the item must not see the variable ``PYTEST_DEBUG_TEMPROOT``, which this rank
            sets so that pytest makes temporary directories in a place of its own. True under cold
            torchrun: there a test shall see an ordinary environment.
    """

    nodeid: str
    device: str
    directory: str
    world_size: int
    session: str
    shared: str = ""
    plain: bool = False


# Now, because later a test may have broken what decoding needs.
decode.prepare(ItemPayload)


def run(payload: Mapping[str, Any], log: RankLog) -> None:
    """Run one item on this rank, and write its phases to the log.

    It returns only if the item did not fail here: at a failure ``RankReporter`` ends the process.

    Args:
        payload: An ``ItemPayload`` as plain data.
        log: The log of this rank.
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
    """Have what pytest runs in the block reported to the log, captured, and given its directories.

    Args:
        item: The item that the block runs.
        payload: The payload of the request.
        log: The log of this rank.
        process_directory: Where this process captures output and has temporary directories. That is
            the directory of the run, or, for ranks that run several items, of their first one:
            pytest makes its base temporary directory once in a process.
    """
    directory = Path(payload.directory)
    config = item.config
    # ``launched.WORLD`` and ``SHARED`` are what the fixtures of this package read on a rank.
    world = config.stash[WORLD] = World.from_environment(payload.device)
    # Several ranks may share a GPU; then each may use only its part of the memory.
    if world.divides_memory:
        import torch

        # Also for a test without the fixture process_group, whose trainer makes its group itself.
        world.divide_memory_once_used(torch)
    shared = "shared"
    if log.by_hand:
        # It repeats an earlier run, whose files may still be in the directory. torchrun gives all
        # ranks of a run the same id.
        shared = f"shared-{os.environ['TORCHELASTIC_RUN_ID']}"
    config.stash[SHARED] = Path(payload.shared or directory, shared)
    RankReporter.of(config).begin(log, payload.world_size, directory)
    fault_handler(config)
    root = process_directory / f"tmp-{log.rank}"
    own_directory = _own_temporary_directory(root)
    if payload.plain:
        own_directory = _made_in(root, config)
    with own_directory, capturing(config, process_directory, log.rank):
        yield


@functools.cache
def items_of(session: pytest.Session) -> Mapping[str, pytest.Item]:
    """Return the items by their node ids.

    Cached: ranks that several tests share look up many of them.
    """
    return {item.nodeid: item for item in session.items}


def find_item(session: pytest.Session, nodeid: str) -> pytest.Item:
    """Return the item of that node id.

    Raises:
        LookupError: This rank has not collected it. The message has the error of its module, or the
            node ids that are close to it.
    """
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
    """Have pytest make its base directory in ``root`` now; the test sees the variable as it was.

    ``tests/plugin/test_private_names.py`` fails when the factory's private name goes away.
    """
    with _own_temporary_directory(root):
        # Without pytest's plugin tmpdir there is none.
        factory = getattr(config, "_tmp_path_factory", None)
        if factory is not None:
            factory.getbasetemp()
    yield
