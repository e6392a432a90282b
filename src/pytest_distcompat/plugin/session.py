"""What one pytest session knows of us: the device, the world size, the launcher, the runner. Made when first needed."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import tempfile
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat import clock
from pytest_distcompat.devices import CPU_WORLD_SIZE
from pytest_distcompat.excerpt import visible
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.plugin import pyproject
from pytest_distcompat.plugin.options import PRELOAD, Setting, setting
from pytest_distcompat.plugin.reporting import reproduce

if TYPE_CHECKING:
    from pytest_distcompat.known import KnownIssue
    from pytest_distcompat.launch import Launcher
    from pytest_distcompat.lease import Inventory, Pool
    from pytest_distcompat.runner import Runner

SESSION: pytest.StashKey[DistcompatSession] = pytest.StashKey()

#: Why a plugin that forks for each test (pytest-forked) is refused.
FORKED = (
    "tests whose ranks are processes of their own cannot run in a fork of pytest's process: leave out --forked, "
    "or whatever else forks for each test"
)


class DistcompatWarning(pytest.PytestWarning):
    """Something the user should know, once."""


class DistcompatSession:
    """Settings and machinery of one pytest process."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        #: When it began, by CLOCK_MONOTONIC.
        self.began = clock.now()
        #: What the fork server imports. Whoever trains needs the last: each optimizer imports it when it is made, and
        #: DistributedDataParallel too, which is more than a second of every rank that has to do it itself.
        self.modules: tuple[str, ...] = ("torch", "torch.distributed", "torch._dynamo")
        self.collects = False
        self._launcher: Launcher | None = None
        self._process = os.getpid()

    def setting(self, name: str) -> Setting:
        """The effective value of ``distcompat_<name>``."""
        return setting(self.config, f"distcompat_{name}")

    @functools.cached_property
    def gpus(self) -> int:
        """How many GPUs to use. Raises pytest.UsageError when more are asked for than are visible."""
        asked, device = self.setting("gpus"), self.setting("device").value
        if (device == "cpu" and asked.value not in {"auto", 0}) or (device == "cuda" and asked.value == 0):
            raise pytest.UsageError(
                f"--distcompat-gpus {asked.value} and --distcompat-device {device} exclude each other"
            )
        if device == "cpu" or asked.value == 0:
            return 0
        from pytest_distcompat.devices import visible_gpus

        visible = visible_gpus()
        if asked.value == "auto":
            if device == "cuda" and not visible:
                raise pytest.UsageError("--distcompat-device cuda: no GPU is visible (NVML, CUDA_VISIBLE_DEVICES)")
            return visible
        if asked.value > visible:
            raise pytest.UsageError(
                f"--distcompat-gpus {asked.value} ({asked.origin}): {visible} visible "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}); "
                "use auto for what there is, 0 for the CPU"
            )
        return int(asked.value)

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``."""
        return "cuda" if self.gpus else "cpu"

    @functools.cached_property
    def gpu_name(self) -> str:
        """What the GPUs are called, which tells how fast they could be; empty on the CPU."""
        from pytest_distcompat.devices import gpu_name

        return gpu_name() if self.gpus else ""

    @functools.cached_property
    def world_size(self) -> int:
        """The number of ranks where a test does not say. Raises pytest.UsageError for more than there are GPUs."""
        asked = self.setting("world_size")
        if asked.value == "auto":
            return self.gpus or CPU_WORLD_SIZE
        problem = self.too_large(asked.value)
        if problem:
            raise pytest.UsageError(f"--distcompat-world-size {asked.value} ({asked.origin}): {problem}")
        return int(asked.value)

    @property
    def ranks_each(self) -> int:
        """How many ranks may share a GPU where there are fewer GPUs than ranks."""
        return int(self.setting("oversubscribe").value)

    def too_large(self, world_size: int) -> str:
        """Why a group of that size cannot be had, empty if it can."""
        each = self.ranks_each
        if self.gpus and world_size > self.gpus * each:
            allowed = f", {each} ranks on each at most" if each > 1 else ""
            return f"{world_size} ranks need {-(-world_size // each)} GPUs, {self.gpus} to use{allowed}"
        return ""

    @property
    def timeout(self) -> float:
        """The time limit of a run in seconds."""
        return float(self.setting("timeout").value)

    @functools.cached_property
    def store(self) -> Path:
        """A directory for this session's runs, the same for all xdist workers."""
        self.store_path.mkdir(parents=True, exist_ok=True)
        return self.store_path

    @functools.cached_property
    def store_path(self) -> Path:
        """Where the store is, or would be."""
        base = session_basetemp(self.config)
        return (base.parent if hasattr(self.config, "workerinput") else base) / "distcompat"

    @property
    def runs(self) -> Path:
        """The part of the store that holds the runs of suites."""
        return self.store / "runs"

    @property
    def launcher(self) -> Launcher:
        """The launcher of this process. Raises UsageProblem in a fork of it."""
        from pytest_distcompat.launch import LAUNCHERS, Warmth
        from pytest_distcompat.launch.request import import_path
        from pytest_distcompat.leased import LeasedLauncher
        from pytest_distcompat.plugin.inside import rank_session

        if os.getpid() != self._process:
            raise UsageProblem(FORKED)
        if self._launcher is None:
            preload: list[str] = self.config.getini(PRELOAD)
            call, payload, own = "", dict[str, Any](), tuple[str, ...]()
            if self.collects:
                call = rank_session.COLLECT
                payload = rank_session.describe(self.config)
                own = rank_session.own_files(self.config)
            modules = tuple(dict.fromkeys((*self.modules, *preload)))
            limit = float(self.setting("warm_timeout").value)
            warmth = Warmth(modules, tuple(preload), call, payload, path=import_path(), own=own, timeout=limit)
            kind: Any = LAUNCHERS[self.setting("launcher").value]
            self._launcher = LeasedLauncher(kind(warmth, device=self.device), lambda: self.pool, self.notice)
        assert self._launcher is not None
        return self._launcher

    @functools.cached_property
    def cold_launcher(self) -> Launcher:
        """The torchrun command, for what is run a second time."""
        from pytest_distcompat.launch import TorchrunLauncher, Warmth
        from pytest_distcompat.leased import LeasedLauncher

        return LeasedLauncher(TorchrunLauncher(Warmth(), device=self.device), lambda: self.pool, self.notice)

    @functools.cached_property
    def verified(self) -> float:
        """The share of items that are run a second time, in percent. Raises pytest.UsageError if there is nothing to compare."""
        percent = float(self.setting("verify").value)
        if percent and self.setting("launcher").value != "warm":
            raise pytest.UsageError(
                "--distcompat-verify compares warm ranks with torchrun's; expected no --distcompat-launcher torchrun beside it"
            )
        return percent

    def verifies(self, nodeid: str) -> bool:
        """Return whether that item is run a second time, under cold torchrun: other ones each day."""
        today = int(clock.wall() // 86400)
        # The same in all workers of xdist, whatever their hash seeds.
        return zlib.crc32(f"{today} {nodeid}".encode()) % 10000 < 100 * self.verified

    @property
    def keeping(self) -> str:
        """For which tests ranks wait; empty if for none."""
        return self._launcher.keeping if self._launcher is not None else ""

    @functools.cached_property
    def pool(self) -> Pool:
        """What lends devices to the runs of this session and of all others of this user."""
        from pytest_distcompat.lease import Pool

        worker = getattr(self.config, "workerinput", {}).get("workerid", "")
        return Pool(None, self.inventory, timeline=self.store, worker=worker, say=self.say)

    @functools.cached_property
    def inventory(self) -> Inventory:
        """What there is to lend."""
        from pytest_distcompat.lease import cpu_slots, gpus

        return gpus(self.gpus, self.ranks_each) if self.gpus else cpu_slots()

    @property
    def limits(self) -> dict[str, float]:
        """What the user demands of measured numbers, by name; nothing for what there is no limit to."""
        return {name: value for name in ("throughput",) if (value := self.setting(name).value)}

    @functools.cached_property
    def own(self) -> tuple[KnownIssue, ...]:
        """The known issues that the user declares: those of his files, and those of pyproject.toml."""
        of_files: tuple[KnownIssue, ...] = self.setting("known").value
        found = (*of_files, *pyproject.known(self.config))
        for issue in found:
            _check_words(issue)
        return found

    @functools.cache  # noqa: B019 - a session lives as long as its process
    def _known_of(self, libraries: tuple[str, ...]) -> tuple[KnownIssue, ...]:
        """Once a driver: it looks versions up, and every item of a suite asks."""
        from pytest_distcompat.known import concerning, shipped

        return concerning((*self.own, *shipped()), libraries, self.device)

    def known_of(self, libraries: tuple[str, ...], nodeid: str) -> tuple[KnownIssue, ...]:
        """The known issues of these libraries (``known.concerned``), in the versions that are installed, on this device.

        Those of the user, and those that come with the package, that may be about the item.
        """
        return tuple(issue for issue in self._known_of(libraries) if issue.speaks_of(nodeid))

    @functools.cached_property
    def runner(self) -> Runner:
        """What runs the runs of suites."""
        return self._runner(self.runs, self.launcher)

    @functools.cached_property
    def cold_runner(self) -> Runner:
        """What runs them a second time, under cold torchrun."""
        return self._runner(self.store / "verified", self.cold_launcher)

    def _runner(self, store: Path, launcher: Launcher) -> Runner:
        from pytest_distcompat.runner import Runner

        return Runner(
            store,
            launcher,
            device=self.device,
            timeout=self.timeout,
            notice=self.notice,
            limits=self.limits,
        )

    @functools.cached_property
    def _items(self) -> Path:
        items = self.store / "items"
        items.mkdir(exist_ok=True)
        return items

    def new_directory(self, name: str) -> Path:
        """A fresh directory for one run of a marked test."""
        # A file's name may have 255 bytes, and a function's any number.
        return Path(tempfile.mkdtemp(prefix=f"{name.encode()[:60].decode(errors='ignore')}-", dir=self._items))

    @functools.cached_property
    def described(self) -> Path:
        """A file from which a rank that is started without a fork server collects what this process did."""
        from pytest_distcompat.plugin.inside import rank_session

        worker = getattr(self.config, "workerinput", {}).get("workerid", "main")
        path = self.store / f"session-{worker}.json"
        path.write_text(json.dumps(rank_session.describe(self.config)), encoding="utf-8")
        return path

    def notice(self, text: str) -> None:
        """Tell the user, as a warning in pytest's summary; never raises."""
        try:
            warnings.warn(DistcompatWarning(text), stacklevel=2)
        except DistcompatWarning:
            # Warnings are errors (-W error). This one would end the session, or hide what the ranks said.
            with warnings.catch_warnings():
                warnings.simplefilter("always", DistcompatWarning)
                warnings.warn(DistcompatWarning(text), stacklevel=2)

    def say(self, text: str) -> None:
        """Tell the user at once, past pytest's capture. An xdist worker has the terminal of its parent as its stderr."""
        capture: Any = self.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
            # pytest may be in the middle of a line of dots.
            print(f"\ndistcompat: {visible(text)}", file=sys.stderr, flush=True)  # noqa: T201 - a warning would come when all is over

    def reproduce(self, item: pytest.Function) -> str:
        """The command that runs that one item again, as it was run, from the same directory."""
        return reproduce.command(self.config, item)

    def close(self) -> None:
        """End the launcher."""
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None
        if "cold_launcher" in vars(self):
            self.cold_launcher.close()


def _check_words(issue: KnownIssue) -> None:
    """Raise pytest.UsageError for a check, a strategy or a precision that there is not."""
    from pytest_distcompat.plugin.suite.declared_names import check_words

    try:
        for expectation in issue.expectations:
            check_words(expectation)
    except UsageProblem as problem:
        raise pytest.UsageError(f"{issue.where}: {problem}") from None


def session_basetemp(config: pytest.Config) -> Path:
    """The base temporary directory of this run, kept as long as pytest keeps it.

    Outside a fixture only the private ``config._tmp_path_factory`` tells (pytest-xdist reads it too);
    ``tests/plugin/test_private_names.py`` says when it goes away.
    """
    base: Path = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # noqa: SLF001
    return base
