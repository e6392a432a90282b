"""The plugin's state in one pytest process: device, world size, launcher, runner.

``plugin.current.session_of(config)`` makes a ``DistcompatSession`` when the first distributed test
is collected, or when an option of the plugin was set. The hooks of the plugin and its extensions
take everything from it: settings, the launcher that starts ranks, the runner of suites. Each xdist
worker has one, and so has xdist's controller.

Words in this file:

- *rank*: a process of a torchrun process group, on which a test runs.
- *marked test*: a test with ``@pytest.mark.distcompat``, which runs on ranks.
- *suite*: a subclass of ``CompatSuite``. It has a *cell* for each configuration of its trainer,
  such as ``fsdp2-fp32-w2`` (strategy, precision, 2 ranks), and an item for each *check* in each
  cell.
- *driver*: the trainer that a suite tests. *profile*: which cells of a suite run, as ``smoke``.
- *run*: one process group from start to end, for a marked test or for the checks of a cell.
- *launcher*: starts the ranks of a run and waits for them. The warm one forks ranks from a *fork
  server*, which has imported torch and collected the tests. The cold one is the ``torchrun``
  command.
- *lease*: the right of a run to use some devices for a while. A *pool* gives leases, so that all
  processes on the machine together do not use a device twice.
- *store*: a directory of the session, in which all its processes share files.
- *substitute*: an extension that runs the cells of suites without ranks, as by one process whose
  tensors have no values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import sys
import tempfile
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat import clock, devices
from pytest_distcompat.cell import Cell
from pytest_distcompat.excerpt import visible
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.plugin.debugging import FAILED_RUN, FailedRun
from pytest_distcompat.plugin.on_ranks import rank_session, session_description
from pytest_distcompat.plugin.on_ranks.launched import ON_RANK
from pytest_distcompat.plugin.options import Setting, setting
from pytest_distcompat.plugin.placement import Placement
from pytest_distcompat.plugin.reporting import reproduce
from pytest_distcompat.plugin.selection import strip_group
from pytest_distcompat.report.document import Report

if TYPE_CHECKING:
    from pytest_distcompat.known import KnownIssue
    from pytest_distcompat.launch.launcher import Launcher
    from pytest_distcompat.launch.request import Warmth
    from pytest_distcompat.lease import Inventory, Pool
    from pytest_distcompat.runner import Runner
    from pytest_distcompat.substitute import Substitute

#: Where the pytest configuration has the session: a key of its stash, pytest's dictionary for the
#: data of plugins.
SESSION: pytest.StashKey[DistcompatSession] = pytest.StashKey()

#: The file in the store with a line for each suite some of whose cells the profile leaves out. The
#: process that has the terminal shows the lines.
LEFT_OUT = "left_out.json"

#: The message for a plugin that forks for each test (pytest-forked).
FORKED = (
    "tests whose ranks are processes of their own cannot run in a fork of pytest's process: "
    "leave out --forked, or whatever else forks for each test"
)


class DistcompatWarning(pytest.PytestWarning):
    """A warning of this plugin, in pytest's summary."""


class DistcompatSession:
    """Settings, launcher and runner of one pytest process.

    Most properties are cached and computed on first use: to ask for GPUs or to start a launcher
    takes time, and some sessions never need it.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        #: When the session began, in seconds of CLOCK_MONOTONIC.
        self.began = clock.now()
        #: Modules that the fork server imports; suites add those of their drivers. Optimizers and
        #: DistributedDataParallel import ``torch._dynamo`` when they are made: that takes more than
        #: a second on every rank that has to do it itself.
        self.modules: tuple[str, ...] = ("torch", "torch.distributed", "torch._dynamo")
        #: Whether the fork server collects the tests too. True if there are marked tests, which a
        #: rank runs as pytest items; the ranks of suites need no items.
        self.collects = False
        #: Module and qualified name of a suite to the line that says how many of its cells the
        #: profile leaves out. Suites of this package have none.
        self.left_out: dict[tuple[str, str], str] = {}
        #: None until it is first needed.
        self._launcher: Launcher | None = None
        #: The cells, each with its driver, that started before the budget was used up.
        self._started: set[tuple[str, Cell]] = set()
        #: The process that made the session, to notice a fork of it.
        self._process = os.getpid()

    def setting(self, name: str) -> Setting:
        """Return the effective value of ``distcompat_<name>``, such as ``timeout``."""
        return setting(self.config, f"distcompat_{name}")

    @property
    def worker(self) -> str:
        """The name of this process among the workers of xdist, as ``gw0``; empty in any other.

        xdist gives each worker a dictionary ``config.workerinput``, which other processes lack.
        """
        return str(getattr(self.config, "workerinput", {}).get("workerid", ""))

    @property
    def has_terminal(self) -> bool:
        """Whether this process reports the session: it is neither a rank nor a worker of xdist."""
        return ON_RANK not in self.config.stash and not self.worker

    @functools.cached_property
    def substitute(self) -> Substitute | None:
        """The substitute that a command-line option turns on; None for ranks."""
        chosen: Substitute | None = self.config.hook.pytest_distcompat_substitute(session=self)
        return chosen

    @property
    def timeout(self) -> float:
        """The time limit of a run in seconds."""
        return float(self.setting("timeout").value)

    # Devices and ranks.

    @functools.cached_property
    def gpus(self) -> int:
        """The number of GPUs to use; 0 for runs on the CPU.

        Raises:
            pytest.UsageError: The option asks for more GPUs than are visible.
        """
        requested = self.setting("gpus")
        # A substitute needs no devices.
        if requested.value == 0 or self.substitute is not None:
            return 0
        available = devices.visible_gpus()
        if requested.value == "auto":
            return available
        if requested.value > available:
            variable = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
            raise pytest.UsageError(
                f"--distcompat-gpus {requested.value} ({requested.origin}): "
                f"{available} visible (CUDA_VISIBLE_DEVICES={variable}); "
                "use auto for what there is, 0 for the CPU"
            )
        return int(requested.value)

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``."""
        return "cuda" if self.gpus else "cpu"

    @functools.cached_property
    def gpu_name(self) -> str:
        """The name of the GPUs, from which their peak speed is known; empty on the CPU."""
        return devices.gpu_name() if self.gpus else ""

    @functools.cached_property
    def uses_mig(self) -> bool:
        """Whether a MIG instance is among the devices to use.

        That is a part of a GPU with a UUID of its own. Cells with DeepSpeed are skipped then.
        """
        if self.gpus == 0:
            return False
        names = devices.visible_ids()[: self.gpus]
        return any(name.startswith("MIG-") for name in names)

    @functools.cached_property
    def world_size(self) -> int:
        """The number of ranks of tests that do not set one.

        Raises:
            pytest.UsageError: There are not enough GPUs for it.
        """
        if self.substitute is not None:
            return self.substitute.world_size
        requested = self.setting("world_size")
        if requested.value == "auto":
            # One rank shows little. So two ranks share the only GPU if they can.
            if self.gpus == 1 and self.ranks_each > 1 and self.nccl_takes_shared_ranks:
                return devices.CPU_WORLD_SIZE
            return self.gpus or devices.CPU_WORLD_SIZE
        problem = self.too_large(requested.value)
        if problem:
            raise pytest.UsageError(
                f"--distcompat-world-size {requested.value} ({requested.origin}): {problem}"
            )
        return int(requested.value)

    @property
    def ranks_each(self) -> int:
        """The number of ranks that may share a GPU where there are fewer GPUs than ranks."""
        each = self.setting("ranks_per_gpu").value
        if each != "auto":
            return int(each)
        if self.gpus == 1 and self.nccl_takes_shared_ranks:
            return devices.CPU_WORLD_SIZE
        return 1

    @property
    def runs_share(self) -> bool:
        """Whether ranks of several runs may use a GPU at the same time.

        They may only if the user has said how many ranks share a GPU, because some tests need a
        whole one. They may not if a limit on the throughput makes the session measure time.
        """
        return self.setting("ranks_per_gpu").value != "auto" and not self.limits

    @functools.cached_property
    def nccl_takes_shared_ranks(self) -> bool:
        """Whether the NCCL library that ranks load lets several ranks share one GPU."""
        from pytest_distcompat.launch import nccl

        library = nccl.library()
        return library is not None and library.shares_gpus

    def shares_through_gloo(self, world_size: int) -> bool:
        """Tell whether ranks of a group of that size use gloo on GPUs.

        They do if some share a GPU, and the installed NCCL does not support that.
        """
        return 0 < self.gpus < world_size and not self.nccl_takes_shared_ranks

    def too_large(self, world_size: int) -> str:
        """Return why there are not enough GPUs for a group of that size; empty if there are."""
        each = self.ranks_each
        if not self.gpus or world_size <= self.gpus * each:
            return ""
        needed = math.ceil(world_size / each)
        reason = f"{world_size} ranks need {needed} GPUs, {self.gpus} to use"
        if each > 1:
            reason += f", {each} ranks on each at most"
        return reason

    @functools.cached_property
    def placement(self) -> Placement:
        """On which machines runs are: on this one, unless an extension says otherwise."""
        placement: Placement | None = self.config.hook.pytest_distcompat_placement(session=self)
        return placement or Placement()

    # Which cells run.

    @functools.cached_property
    def _strategies(self) -> tuple[str, ...]:
        """The strategies that ``--distcompat-strategies`` selects; empty for all."""
        strategies: tuple[str, ...] = self.setting("strategies").value
        return strategies

    @functools.cached_property
    def _precisions(self) -> tuple[str, ...]:
        """The precisions that ``--distcompat-precisions`` selects; empty for all."""
        precisions: tuple[str, ...] = self.setting("precisions").value
        return precisions

    def selects(self, cell: Cell, *, any_precision: bool = False) -> bool:
        """Tell whether the options select the cell's strategy and its precision.

        With ``any_precision`` the option for precisions is ignored: some profiles run one check in
        cells of a precision of their own.
        """
        if self._strategies and cell.strategy not in self._strategies:
            return False
        if any_precision or not self._precisions:
            return True
        return cell.precision in self._precisions

    def over_budget(self, driver: str, cell: Cell) -> str | None:
        """Return why that cell does not start any more; None if it does, or has started.

        Once a cell has started, all its checks run. So each cell that may start is noted.
        """
        budget = self.setting("budget")
        has_started = (driver, cell) in self._started
        if budget.value and not has_started:
            passed = clock.now() - self.began
            if passed > budget.value.seconds:
                return f"the budget of {budget.text} is used up"
        self._started.add((driver, cell))
        return None

    @functools.cached_property
    def last_report(self) -> Report | None:
        """The report of an earlier session, for the order of cells and the expected durations.

        It is the baseline, or else the JSON report that this session will replace. None if there is
        neither.
        """
        baseline: Report | None = self.setting("baseline").value
        if baseline is not None:
            return baseline
        for path in self.setting("report").value:
            # Not a pipe or a device, such as /dev/stdout: to read one may never end.
            if path.suffix == ".json" and path.is_file():
                with contextlib.suppress(UsageProblem):
                    return Report.read(path)
        return None

    @functools.cached_property
    def verified(self) -> float:
        """The share of items that are run a second time under cold torchrun, in percent.

        Raises:
            pytest.UsageError: The first run is cold too, so that there is nothing to compare.
        """
        percent = float(self.setting("verify").value)
        if percent and self.setting("launcher").value != "warm":
            raise pytest.UsageError(
                "--distcompat-verify compares warm ranks with torchrun's; "
                "expected no --distcompat-launcher torchrun beside it"
            )
        return percent

    def verifies(self, nodeid: str) -> bool:
        """Tell whether that item is run a second time, under cold torchrun.

        Each day selects other items.
        """
        # The number of days since 1970.
        today = int(clock.wall() // 86400)
        # crc32 and not hash(): all xdist workers must select the same items, and each has its own
        # hash seed.
        drawn = zlib.crc32(f"{today} {nodeid}".encode())
        # Both sides are in hundredths of a percent.
        return drawn % 10000 < 100 * self.verified

    @property
    def limits(self) -> dict[str, float]:
        """Limits that the user sets for measured numbers: ``{"throughput": 0.9}``, or empty.

        0.9 means: fail a cell with less than 0.9 of the tokens/s of the baseline strategy.
        """
        throughput = self.setting("throughput").value
        return {"throughput": throughput} if throughput else {}

    # The store: a directory of this session, which all xdist workers share.

    @property
    def store(self) -> Path:
        """The directory of this session's runs, which all xdist workers share.

        Made on first use, or if it is gone.
        """
        self.store_path.mkdir(parents=True, exist_ok=True)
        return self.store_path

    @functools.cached_property
    def store_path(self) -> Path:
        """The path of ``store``, which need not exist yet."""
        base = session_basetemp(self.config)
        # xdist gives each worker a directory of its own in that of the controller.
        if self.worker:
            base = base.parent
        return base / "distcompat"

    @property
    def runs(self) -> Path:
        """The part of the store that holds the runs of suites."""
        return self.store / "runs"

    def new_directory(self, name: str) -> Path:
        """Make a new directory for one run of a marked test, and return it."""
        items = self.store / "items"
        items.mkdir(exist_ok=True)
        # The name of a file is limited to 255 bytes, that of a function is not.
        short = name.encode()[:60].decode(errors="ignore")
        return Path(tempfile.mkdtemp(prefix=f"{short}-", dir=items))

    @property
    def description_file(self) -> Path:
        """The JSON file from which a rank makes the same pytest session, without a fork server.

        It is written on first use. ``session_description.describe`` explains its content.
        """
        worker = self.worker or "main"
        path = self.store / f"session-{worker}.json"
        if not path.exists():
            description = session_description.describe(self.config)
            path.write_text(json.dumps(description), encoding="utf-8")
        return path

    def share(self, name: str, data: Any) -> None:
        """Write plain data into the store, for the process that has the terminal.

        All xdist workers write the same. So the file is renamed when it is complete, and it does
        not matter whose stays.

        Args:
            name: The name of the file, such as ``demands.json``.
            data: What is written as JSON.
        """
        # On a full disk there is no such file; the tests themselves report what they cannot write.
        with contextlib.suppress(OSError):
            temporary = self.store / f"{name}.{os.getpid()}"
            temporary.write_text(json.dumps(data), encoding="utf-8")
            temporary.rename(self.store / name)

    def shared(self, name: str) -> Any:
        """Return what any process of this session wrote by ``share``; None if none did."""
        path = self.store_path / name
        if not path.exists():
            return None
        return json.loads(path.read_text(encoding="utf-8"))

    # Launchers, which start ranks.

    @property
    def launcher(self) -> Launcher:
        """The launcher of this process, which is made on first use.

        Raises:
            UsageProblem: This process is a fork of the one that made the session, as under
                pytest-forked.
        """
        if os.getpid() != self._process:
            raise UsageProblem(FORKED)
        if self._launcher is None:
            warmth = self._warmth()
            self._launcher = self._launcher_of_this_machine(warmth)
            if self.substitute is None:
                self._launcher = self.placement.launcher(self._launcher, warmth)
        return self._launcher

    def _launcher_of_this_machine(self, warmth: Warmth) -> Launcher:
        """Return the launcher of a substitute, else the one that ``--distcompat-launcher`` names.

        The latter leases devices from the pool for each run.
        """
        from pytest_distcompat.launch.torchrun import LAUNCHERS
        from pytest_distcompat.leased import LeasedLauncher

        if self.substitute is not None:
            return self.substitute.launcher()
        # The class for ``warm`` or ``torchrun``.
        kind: Any = LAUNCHERS[self.setting("launcher").value]
        warm_or_cold = kind(warmth, device=self.device)
        # The pool is made when the first run begins, hence the function.
        return LeasedLauncher(warm_or_cold, lambda: self.pool, self.notice)

    def _warmth(self) -> Warmth:
        """Return what the fork servers import and do before ranks start.

        With marked tests they also call ``rank_session.collect``, to which the payload goes.
        """
        from pytest_distcompat.launch.request import Warmth, import_path

        warmth = Warmth(
            modules=self._preloaded(),
            path=import_path(),
            timeout=float(self.setting("warm_timeout").value),
        )
        if not self.collects:
            return warmth
        return dataclasses.replace(
            warmth,
            call=rank_session.COLLECT,
            payload=session_description.describe(self.config),
            own=session_description.own_files(self.config),
        )

    def _preloaded(self) -> tuple[str, ...]:
        """Return the modules that the fork server imports, those of extensions too."""
        modules = list(self.modules)
        for by_extension in self.config.hook.pytest_distcompat_preload(session=self):
            modules += by_extension
        return tuple(dict.fromkeys(modules))

    @functools.cached_property
    def cold_launcher(self) -> Launcher:
        """The launcher for tests that are run a second time (``--distcompat-verify``).

        It runs the cold ``torchrun`` command. ``plain`` gives its ranks the user's own environment.
        """
        from pytest_distcompat.launch.request import Warmth
        from pytest_distcompat.launch.torchrun import TorchrunLauncher
        from pytest_distcompat.leased import LeasedLauncher

        return LeasedLauncher(
            TorchrunLauncher(Warmth(), device=self.device, plain=True),
            lambda: self.pool,
            self.notice,
        )

    def close(self) -> None:
        """Close the launchers and end their processes."""
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None
        # A cached property is in ``vars`` once it was used; to read it here would make a launcher.
        if "cold_launcher" in vars(self):
            self.cold_launcher.close()

    # Leases of devices.

    @functools.cached_property
    def pool(self) -> Pool:
        """The pool that leases devices to the runs of all sessions of this user."""
        from pytest_distcompat.lease import Pool

        scheduled: Pool | None = self.config.hook.pytest_distcompat_pool(
            session=self, inventory=self.inventory
        )
        if scheduled is not None:
            return scheduled
        return Pool(None, self.inventory, **self.pool_options)

    @property
    def pool_options(self) -> dict[str, Any]:
        """The arguments of ``Pool`` that say where it writes and what it calls.

        ``timeline`` is the directory of the file with all leases, ``worker`` the xdist worker that
        the entries name, ``notify`` prints a message to the user.
        """
        return {"timeline": self.store, "worker": self.worker, "notify": self.say}

    @functools.cached_property
    def inventory(self) -> Inventory:
        """The devices that can be leased: the GPUs, or else slots of the CPU."""
        from pytest_distcompat.lease import cpu_slots, gpus

        if self.gpus == 0:
            return cpu_slots()
        return gpus(self.gpus, self.ranks_each, runs_share=self.runs_share)

    def waits(self) -> str:
        """Return what a run of this process waits for; empty if it need not wait for devices."""
        # Not by the property: the thread that shows progress calls this, and would then make the
        # pool.
        pool: Pool | None = vars(self).get("pool")
        return pool.waits if pool is not None else ""

    # Runners of suites.

    @functools.cached_property
    def runner(self) -> Runner:
        """The runner of suites: each distinct run once, for all checks and xdist workers."""
        return self._runner(self.runs, self.launcher)

    @functools.cached_property
    def cold_runner(self) -> Runner:
        """The runner of suites under cold torchrun, for checks that are run a second time."""
        return self._runner(self.store / "verified", self.cold_launcher)

    def _runner(self, store: Path, launcher: Launcher) -> Runner:
        """Return a runner that keeps its runs in the directory ``store``."""
        from pytest_distcompat.runner import Runner

        recorders: list[Any] = []
        for by_extension in self.config.hook.pytest_distcompat_recorders(session=self):
            recorders += by_extension
        return Runner(
            store,
            launcher,
            device=self.device,
            timeout=self.timeout,
            worker=self.worker,
            notice=self.notice,
            limits=self.limits,
            log_level=self._log_level(),
            recorders=tuple(recorders),
        )

    def _log_level(self) -> str:
        """Return the level of log records that pytest's plugin logging captures, as ``INFO``.

        Empty if it sets none, or the user has blocked the plugin. Ranks of suites use the same.
        """
        level = self.config.getoption("log_level", None)
        if not level and self.config.pluginmanager.hasplugin("logging"):
            level = self.config.getini("log_level")
        return str(level or "")

    # Known issues.

    @functools.cached_property
    def own(self) -> tuple[KnownIssue, ...]:
        """The known issues that the user declares, in files of ``--distcompat-known``.

        A known issue is a bug for which a failure is expected, in some checks of some cells.

        Raises:
            pytest.UsageError: An issue names a check, a strategy or a precision that does not
            exist.
        """
        from pytest_distcompat.plugin.suite.declared_names import check_names

        issues: tuple[KnownIssue, ...] = self.setting("known").value
        for issue in issues:
            try:
                for expectation in issue.expectations:
                    check_names(expectation)
            except UsageProblem as problem:
                raise pytest.UsageError(f"{issue.where}: {problem}") from None
        return issues

    @functools.cache  # noqa: B019 - a session lives as long as its process
    def _known_of(self, libraries: tuple[str, ...]) -> tuple[KnownIssue, ...]:
        """Return the known issues of these libraries on this session's device.

        Cached: to find them, the versions of all packages are read, and every item of a suite asks.
        """
        from pytest_distcompat.known import concerning, shipped

        # Those that the installed versions have, and that are about one of the libraries.
        return concerning((*self.own, *shipped()), libraries, self.device)

    def known_of(self, libraries: tuple[str, ...], nodeid: str) -> tuple[KnownIssue, ...]:
        """Return the known issues that may cover the item.

        The user's come first, then those that come with the package.

        Args:
            libraries: The libraries that the item's driver uses, from ``known.names_in_issues``.
            nodeid: The node id of the item, without a group of xdist.
        """
        issues = []
        for issue in self._known_of(libraries):
            if issue.matches_test(nodeid):
                issues.append(issue)
        return tuple(issues)

    # Items.

    def nodeid_of(self, item: pytest.Item) -> str:
        """Return the node id of an item without ``@group``, which xdist may append.

        Ranks, reports and the user's next command line have it without.
        """
        return strip_group(self.config, item.nodeid)

    def note_failed_run(self, item: pytest.Item, command: str, rank: int | None) -> None:
        """Note the run in which an item failed, for ``--pdb``.

        Args:
            item: The item.
            command: The command that repeats the run.
            rank: The rank that raised; None if none did.
        """
        item.stash[FAILED_RUN] = FailedRun(command, rank)

    # Messages.

    def notice(self, text: str) -> None:
        """Emit a warning for pytest's summary; never raises, even where warnings are errors."""
        try:
            warnings.warn(DistcompatWarning(text), stacklevel=2)
        except DistcompatWarning:
            # Warnings are errors (-W error). Raising this one would end the session or hide the
            # failure of the ranks.
            with warnings.catch_warnings():
                warnings.simplefilter("always", DistcompatWarning)
                warnings.warn(DistcompatWarning(text), stacklevel=2)

    def say(self, text: str) -> None:
        """Print a message to stderr now, past pytest's capture.

        An xdist worker shares the stderr of its controller.
        """
        # The user may have blocked pytest's capture.
        capture: Any = self.config.pluginmanager.getplugin("capturemanager")
        uncaptured = (
            capture.global_and_fixture_disabled()
            if capture is not None
            else contextlib.nullcontext()
        )
        with uncaptured:
            # The leading newline ends a line of dots that pytest may be writing. Not a warning:
            # that is shown only at the end of the session.
            print(f"\ndistcompat: {visible(text)}", file=sys.stderr, flush=True)  # noqa: T201

    def reproduce(self, item: pytest.Function) -> str:
        """Return the command that runs that item alone again.

        It has the same options, and runs from the same directory.
        """
        return reproduce.command(self.config, item)


def session_basetemp(config: pytest.Config) -> Path:
    """Return the base temporary directory of this session.

    pytest removes it as it does the directories of ``tmp_path``.

    Outside a fixture it can be read only from the private ``config._tmp_path_factory``, as
    pytest-xdist does. ``tests/plugin/test_private_names.py`` fails when that goes away.
    """
    factory = config._tmp_path_factory  # type: ignore[attr-defined]  # noqa: SLF001
    base: Path = factory.getbasetemp()
    return base
