"""A script or a command line, run on ranks and judged; for pytest, ``unittest`` and plain scripts alike."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_distcompat.cell import Cell, OptionValue
from pytest_distcompat.devices import CPU_WORLD_SIZE, visible_gpus
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.launch.process import on_device
from pytest_distcompat.launch.request import Request
from pytest_distcompat.lease import Pool, cpu_slots, gpus
from pytest_distcompat.leased import told
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scripts import command as commands
from pytest_distcompat.scripts.configuration import find_configuration
from pytest_distcompat.scripts.environment import ON_CPU, with_probe
from pytest_distcompat.scripts.hosting import Hosted
from pytest_distcompat.scripts.result import ScriptRun
from pytest_distcompat.scripts.sight import Sight
from pytest_distcompat.strategies import STRATEGIES


@dataclass(frozen=True)
class Host:
    """Where scripts run: on which ``device`` (``cpu``, ``cuda``), on how many ranks and for how many seconds if nobody says,
    who lends the devices, and which directory holds the runs. If None, each has a temporary one, which is kept if the run
    failed, and goes with this process if it did not.
    """

    device: str
    world_size: int
    pool: Pool
    timeout: float = Request.timeout
    directory: Path | None = None

    @classmethod
    def here(cls) -> Host:
        """All GPUs of this machine, or two ranks on its CPU."""
        found = visible_gpus()
        if found:
            return cls("cuda", found, Pool(None, gpus()))
        return cls("cpu", CPU_WORLD_SIZE, Pool(None, cpu_slots()))

    def new_directory(self, name: str) -> Path:
        """An empty directory for one run."""
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"distcompat-{name}-", dir=self.directory))


def launch(
    script: str | Path,
    *args: str | Path,
    launcher: str = "torchrun",
    strategy: str = "",
    precision: str = "fp32",
    options: Mapping[str, OptionValue] | None = None,
    configuration: str | Path | None = None,
    output: str | Path | None = None,
    world_size: int | None = None,
    timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    blocks: Sequence[str] = (),
    watch_steps: int = Sight.steps,
    stop_after: int = 0,
    bridge: bool = True,
    allow_failure: bool = False,
    host: Host | None = None,
) -> ScriptRun:
    """Run an unmodified script (a path, or ``"-m", "module"``) or command line on ranks, and say how all of them ended.

    ``launcher`` is ``torchrun``, ``accelerate``, or ``cli`` for any command that ends in torchrun, accelerate, deepspeed or
    ``mp.spawn``. ``strategy``, ``precision`` and ``options`` (those of a Cell) say what is to be running: the checks measure by
    them, and ``accelerate`` gets a configuration file made from them, unless ``configuration`` names one, or a directory of
    such; in ``args``, ``{configuration}`` stands for its path. ``output`` is where the script leaves its model.
    ``timeout`` is in seconds, from the start of the launcher. ``environment`` is added to this process's.

    ``blocks`` are class names of the modules that are to be sharded, recomputed and compiled one by one; models of transformers
    declare their own. ``watch_steps`` is how many optimizer steps the probe looks at in full, 0 for no probe; ``stop_after``
    has all ranks leave after the checkpoint of that step, as if they had been preempted. ``bridge=False`` leaves accelerate
    and transformers alone on the CPU: there they refuse FSDP, or drop it without a word. ``host`` says where it runs: on all
    GPUs of the machine, or on two CPU ranks.

    Raises LifeFailure, with the story of all ranks and the first cause first, if the launcher or any rank failed, unless
    ``allow_failure``. Raises UsageProblem for a wrong word, LeaseTimeout if no devices were to be had.
    """
    where = host or Host.here()
    limit = timeout or where.timeout
    if limit < 0:
        raise UsageProblem(f"timeout={timeout!r}: expected a number of seconds above 0")
    classes = (blocks,) if isinstance(blocks, str) else tuple(blocks)
    cell = _cell(strategy, precision, world_size or where.world_size, options or {})
    arguments = tuple(map(str, args))
    directory = where.new_directory(arguments[0] if script == "-m" and arguments else Path(script).stem)
    file = find_configuration(configuration, cell, directory) if strategy or configuration else None
    command = commands.build(
        str(script),
        [argument.replace("{configuration}", str(file)) for argument in arguments],
        launcher,
        world_size=cell.world_size,
        directory=directory,
        configuration=file,
    )
    Sight(watch_steps, where.device, stop_after, classes).write(directory)
    ours = {**command.environment, **(environment or {})}
    if bridge and where.device == "cpu":
        ours[ON_CPU] = "1"
    with where.pool.lease(cell.world_size, who=f"script {script} {cell.id} in {directory}") as lease:
        ours |= lease.environment
        whole = commands.without_rank(on_device(os.environ, where.device)) | ours
        ending = Hosted(
            name=launcher if launcher != "cli" else str(script),
            line=command.line,
            environment=with_probe(whole, directory),
            world_size=cell.world_size,
            directory=directory,
            timeout=limit,
            cwd=Path(cwd or Path.cwd()),
            reproduce=_reproduce(command.line, with_probe(ours, directory), where.device),
        ).run()
    ending = replace(ending, leaks=tuple(map(told, lease.own_leak)))
    run = ScriptRun(ending, cell if strategy else None, directory, where.device, Path(output) if output else None)
    if where.directory is None and not run.failed:
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    if not allow_failure:
        run.raise_if_failed()
    return run


def _cell(strategy: str, precision: str, world_size: int, options: Mapping[str, OptionValue]) -> Cell:
    """What is to be running; where no strategy is named, for its world size only. Raises UsageProblem for a wrong word."""
    PRECISIONS.get(precision)
    if strategy:
        STRATEGIES.get(strategy)
    cell = Cell(strategy or "ddp", precision, world_size, tuple(options.items()))
    problem = STRATEGIES.get(cell.strategy).refuses(cell)
    if problem:
        raise UsageProblem(f"{cell.id}: {problem}")
    return cell


def _reproduce(line: tuple[str, ...], environment: Mapping[str, str], device: str) -> str:
    """The command that runs it alone, with what only we put into the environment."""
    shown = on_device(environment, device) if device == "cpu" else dict(environment)
    return shlex.join(["env", *(f"{name}={value}" for name, value in shown.items()), *line])
