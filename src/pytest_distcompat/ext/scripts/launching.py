"""``launch``: run a script or a command line on ranks, and return how all of them ended.

It is the same for pytest, ``unittest`` and plain Python: a test calls ``launch("train.py", "--lr",
"1", strategy="fsdp2")``, directly or by the fixture ``distcompat`` (``plugin``), and gets a
``ScriptRun``, whose ``check("active", "names")`` judges the run.

``launch`` waits for free devices, makes the command line (``commands``), adds the environment
variables that start the *probe* in every Python process of the script (``environment``), and starts
the launcher, such as torchrun. The probe records what the script trains, in files of the run's
directory. A *rank* is one of the processes that train together. A *cell* says what should run:
``fsdp2-fp32-w2`` is FSDP2 in float32 on 2 ranks. Devices are taken by a *lease*, which keeps other
runs on this machine off them until the run has ended.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_distcompat.cell import OptionValue
from pytest_distcompat.devices import CPU_WORLD_SIZE, visible_gpus
from pytest_distcompat.ext.scripts.commands import command_line, reproduce, without_rank
from pytest_distcompat.ext.scripts.configuration import find_configuration
from pytest_distcompat.ext.scripts.environment import ON_CPU, ProbeConfig, with_probe
from pytest_distcompat.ext.scripts.launch_arguments import (
    check_launch_arguments,
    expected_cell,
    extra_states,
    uses_configuration,
)
from pytest_distcompat.ext.scripts.result import ScriptRun
from pytest_distcompat.failures import hides_frames
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.hosting import Hosted
from pytest_distcompat.launch.process import on_device
from pytest_distcompat.launch.request import Request
from pytest_distcompat.launch.temporary import OwnedDirectory
from pytest_distcompat.lease import Pool, cpu_slots, gpus
from pytest_distcompat.leased import leak_message, rank_environment
from pytest_distcompat.trace import ExtraState

#: pytest looks for this name: https://docs.pytest.org/en/stable/example/simple.html
__tracebackhide__ = hides_frames


@dataclass(frozen=True)
class Host:
    """Where scripts run, and what ``launch`` takes if it is given nothing else."""

    #: ``cpu`` or ``cuda``.
    device: str
    #: The number of ranks.
    world_size: int
    #: Lends GPUs, or places on the CPU, to one run at a time, across processes.
    pool: Pool
    #: The time limit of a run in seconds.
    timeout: float = Request.timeout
    #: Where each run gets a directory of its own. With None it is a temporary one, which is removed
    #: at the end of this process, however it ends, unless the run failed.
    directory: Path | None = None

    @classmethod
    def here(cls) -> Host:
        """Return a host with all GPUs of this machine, or with two ranks on its CPU."""
        gpu_count = visible_gpus()
        if gpu_count:
            return cls("cuda", gpu_count, Pool(None, gpus()))
        return cls("cpu", CPU_WORLD_SIZE, Pool(None, cpu_slots()))

    def new_directory(self, name: str) -> Path:
        """Make an empty directory for one run, whose name contains ``name``."""
        if self.directory is None:
            owned = OwnedDirectory(name)
            _TEMPORARY[owned.path] = owned
            return owned.path
        self.directory.mkdir(parents=True, exist_ok=True)
        path = tempfile.mkdtemp(prefix=f"distcompat-{name}-", dir=self.directory)
        return Path(path)


#: The temporary directories of this process, which are removed when it ends.
_TEMPORARY: dict[Path, OwnedDirectory] = {}


def leave_directory(directory: Path) -> None:
    """Leave the directory of a failed run to the user, who may want to read its logs.

    So a temporary one is not removed at the end of this process.
    """
    owned = _TEMPORARY.pop(directory, None)
    if owned is not None:
        owned.leave()


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
    saved_name: Callable[[str], str] | None = None,
    extra_state: Mapping[str, ExtraState] | Sequence[str] = (),
    watch_steps: int = ProbeConfig.steps,
    stop_after: int = 0,
    bridge: bool = True,
    allow_failure: bool = False,
    fails: str = "",
    host: Host | None = None,
) -> ScriptRun:
    """Run an unmodified script or command line on ranks, and return how all of them ended.

    Args:
        script: A path, ``"-m"`` with the module as the first argument, or a command for
            ``launcher="cli"``.
        *args: The arguments of the script; ``{configuration}`` stands for the path of the
            configuration file.
        launcher: ``torchrun``, ``accelerate``, or ``cli`` for any command that ends in torchrun,
            accelerate, deepspeed or ``mp.spawn``.
        strategy: What should be running. The checks compare with it, and ``accelerate`` gets a
            configuration file for it.
        precision: Likewise.
        options: Likewise, as in a Cell.
        configuration: A configuration file, or a directory of such files, to use instead of a new
            one.
        output: Where the script leaves its model.
        world_size: The number of ranks, instead of the host's.
        timeout: The time limit in seconds, from the start of the launcher, instead of the host's.
        environment: Added to the environment of this process.
        cwd: The working directory, instead of the current one.
        blocks: Class names of the modules that should be sharded, recomputed and compiled one by
            one. Models of transformers declare their own.
        saved_name: Returns the unwrapped name of a saved key, for libraries that change names when
            they save.
        extra_state: Names of variables of the script, such as ``"ema"`` or ``"trainer.ema"``, with
            state beside model and optimizer; with a mapping, an ExtraState for each.
            ``resume_roundtrip`` compares them.
        watch_steps: How many optimizer steps the probe records in full, 0 for no probe.
        stop_after: All ranks exit after the checkpoint of this step, as if they had been preempted.
        bridge: If False, accelerate and transformers are not changed on the CPU: there they reject
            FSDP or silently ignore it.
        allow_failure: Return a failed run instead of raising.
        fails: Declares that the run must fail: a regular expression for the first cause, as the
            first line of the report has it (``"rank 1 raised ValueError"``, ``"exited with code
            3"``). A hang never matches.
        host: Where it runs; by default on all GPUs of the machine, or on two CPU ranks.

    Raises:
        RunFailedError: If the launcher or a rank failed, unless ``allow_failure``, or failed
            otherwise than ``fails`` says. The message reports all ranks, the first cause first.
        Incompatible: If a run that must fail does not.
        UsageProblem: For a wrong argument.
        LeaseTimeout: If the devices do not become free in time.

    """
    # Fill in the defaults, and check all arguments before anything is written.
    host = host or Host.here()
    classes = (blocks,) if isinstance(blocks, str) else blocks
    limit = host.timeout if timeout is None else timeout
    ranks = host.world_size if world_size is None else world_size
    working_directory = Path(cwd or Path.cwd())
    check_launch_arguments(
        script=script,
        args=args,
        blocks=classes,
        saved_name=saved_name,
        timeout=limit,
        world_size=ranks,
        watch_steps=watch_steps,
        cwd=cwd,
        directory=working_directory,
        environment=environment or {},
        fails=fails,
    )
    states = extra_states(extra_state)
    cell = expected_cell(strategy, precision, ranks, options or {})
    arguments = tuple(str(argument) for argument in args)
    uses_file = uses_configuration(launcher, arguments, configuration, strategy)

    # Make the directory of the run, with the configuration files and the settings of the probe.
    directory = host.new_directory(_name_of_run(script, arguments))
    file = None
    if uses_file:
        file = find_configuration(configuration, cell, directory, classes)
    filled = [argument.replace("{configuration}", str(file)) for argument in arguments]
    line, variables = command_line(
        str(script), filled, launcher, world_size=ranks, directory=directory, configuration=file
    )
    ProbeConfig(watch_steps, host.device, stop_after, tuple(classes), states).write(directory)

    # Run the command: ``Hosted`` starts it, watches its ranks, and kills all of them at the time
    # limit.
    #: The variables of the run that this process does not have.
    added = {**variables, **(environment or {})}
    if bridge and host.device == "cpu":
        added[ON_CPU] = "1"
    name = str(script) if launcher == "cli" else launcher
    user = f"script {script} {cell.id} in {directory}"
    command = Hosted(
        name=name,
        line=line,
        environment=added,
        world_size=ranks,
        directory=directory,
        timeout=limit,
        cwd=working_directory,
        reproduce="",
    )
    ending = _run_on_leased_devices(host, command, user)

    # Without a strategy nothing says what should run, so no check compares with it.
    judged_cell = cell if strategy else None
    output_path = Path(output) if output else None
    run = ScriptRun(
        ending,
        judged_cell,
        directory,
        host.device,
        output_path,
        saved_name or ScriptRun.saved_name,
    )
    if run.failed:
        leave_directory(directory)
    if fails:
        run.raise_unless_failed(fails)
    elif not allow_failure:
        run.raise_if_failed()
    return run


def _run_on_leased_devices(host: Host, command: Hosted, user: str) -> Ending:
    """Wait until devices are free, run the command on them, and return how its ranks ended.

    Args:
        host: Where to run.
        command: The command, without its ``reproduce``. Of its ``environment`` only the variables
            that ``launch`` adds to those of this process; the others are filled in here.
        user: Who has the devices, for messages to other processes that wait for them.
    """
    with host.pool.lease(command.world_size, who=user) as lease:
        # The lease says which GPUs the ranks see.
        added = {**command.environment, **rank_environment(lease, command.world_size)}
        complete = without_rank(on_device(os.environ, host.device)) | added
        ending = replace(
            command,
            environment=with_probe(complete, command.directory),
            reproduce=reproduce(
                tuple(command.line), with_probe(added, command.directory), host.device
            ),
        ).run()
    # Known only when the lease has ended: GPU memory in use although all ranks are gone.
    leaks = tuple([leak_message(leak) for leak in lease.own_leak])
    return replace(ending, leaks=leaks)


def _name_of_run(script: str | Path, arguments: Sequence[str]) -> str:
    """Return a name for the directory of a run: ``train`` for ``train.py``, or the module's."""
    if script == "-m" and arguments:
        return arguments[0]
    return Path(script).stem
