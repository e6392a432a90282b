"""Launch of a script or a command line on ranks.

It is the same for pytest, ``unittest`` and plain scripts.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_distcompat.cell import Cell, OptionValue
from pytest_distcompat.devices import CPU_WORLD_SIZE, visible_gpus
from pytest_distcompat.ext.scripts.configuration import find_configuration
from pytest_distcompat.ext.scripts.environment import ON_CPU, ProbeConfig, with_probe
from pytest_distcompat.ext.scripts.result import ScriptRun
from pytest_distcompat.failures import UsageProblem, hides_frames
from pytest_distcompat.launch.environment import OF_THE_AGENT
from pytest_distcompat.launch.hosting import Hosted
from pytest_distcompat.launch.process import on_device
from pytest_distcompat.launch.request import Request
from pytest_distcompat.launch.temporary import OwnedDirectory
from pytest_distcompat.lease import Pool, cpu_slots, gpus
from pytest_distcompat.leased import leak_message, rank_environment
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import ExtraState

#: pytest looks for this name: https://docs.pytest.org/en/stable/example/simple.html
__tracebackhide__ = hides_frames


@dataclass(frozen=True)
class Host:
    """Where scripts run, and what ``launch`` takes if it is given nothing else.

    ``device`` is ``cpu`` or ``cuda``.

    Without a ``directory`` each run has a temporary one, which is removed at the end of this
    process, however it ends, unless the run failed.
    """

    device: str
    world_size: int
    pool: Pool
    timeout: float = Request.timeout
    directory: Path | None = None

    @classmethod
    def here(cls) -> Host:
        """Return a host with all GPUs of this machine, or with two ranks on its CPU."""
        gpu_count = visible_gpus()
        if gpu_count:
            return cls("cuda", gpu_count, Pool(None, gpus()))
        return cls("cpu", CPU_WORLD_SIZE, Pool(None, cpu_slots()))

    def new_directory(self, name: str) -> Path:
        """Make an empty directory for one run."""
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
    """Leave the directory of a failed run to the user, also if it is a temporary one."""
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
    host = host or Host.here()
    classes = (blocks,) if isinstance(blocks, str) else blocks
    limit = host.timeout if timeout is None else timeout
    ranks = host.world_size if world_size is None else world_size
    working_directory = Path(cwd or Path.cwd())
    _check_arguments(
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
    states = _states(extra_state)
    cell = _cell(strategy, precision, ranks, options or {})
    arguments = tuple(str(argument) for argument in args)
    uses_file = _uses_configuration(launcher, arguments, configuration, strategy)
    directory = host.new_directory(_name_of_run(script, arguments))
    file = None
    if uses_file:
        file = find_configuration(configuration, cell, directory, classes)
    filled = [argument.replace("{configuration}", str(file)) for argument in arguments]
    line, variables = command_line(
        str(script), filled, launcher, world_size=ranks, directory=directory, configuration=file
    )
    ProbeConfig(watch_steps, host.device, stop_after, tuple(classes), states).write(directory)
    added = {**variables, **(environment or {})}
    if bridge and host.device == "cpu":
        added[ON_CPU] = "1"
    user = f"script {script} {cell.id} in {directory}"
    with host.pool.lease(cell.world_size, who=user) as lease:
        added |= rank_environment(lease, cell.world_size)
        complete = without_rank(on_device(os.environ, host.device)) | added
        name = str(script) if launcher == "cli" else launcher
        ending = Hosted(
            name=name,
            line=line,
            environment=with_probe(complete, directory),
            world_size=ranks,
            directory=directory,
            timeout=limit,
            cwd=working_directory,
            reproduce=_reproduce(line, with_probe(added, directory), host.device),
        ).run()
    leaks = tuple([leak_message(leak) for leak in lease.own_leak])
    expected_cell = cell if strategy else None
    output_path = Path(output) if output else None
    run = ScriptRun(
        replace(ending, leaks=leaks),
        expected_cell,
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


def _states(given: object) -> dict[str, ExtraState]:
    """Return what is expected of each state that ``extra_state`` names.

    Raises UsageProblem unless it names variables.
    """
    names = (given,) if isinstance(given, str) else given
    if isinstance(names, Mapping):
        states = dict(names)
    elif isinstance(names, (list, tuple)):
        states = dict.fromkeys(names, ExtraState())
    else:
        states = {None: given}
    for name, expected in states.items():
        parts = name.split(".") if isinstance(name, str) else [""]
        named = all(part.isidentifier() for part in parts)
        check_argument(
            "extra_state",
            given,
            named and isinstance(expected, ExtraState),
            "expected names of variables, or a mapping of them to ExtraState",
        )
    return states


def _check_arguments(
    *,
    script: object,
    args: Sequence[object],
    blocks: object,
    saved_name: object,
    timeout: object,
    world_size: object,
    watch_steps: object,
    cwd: object,
    directory: Path,
    environment: Mapping[str, str],
    fails: str,
) -> None:
    """Raise UsageProblem for the first argument of ``launch`` that is wrong.

    ``directory`` is the working directory, which ``cwd`` may name.
    """
    is_path = isinstance(script, (str, Path))
    check_argument(
        "script", script, is_path, "expected a path, or '-m' before the name of a module"
    )
    check_argument("blocks", blocks, _are_texts(blocks), "expected class names")
    callable_or_none = saved_name is None or callable(saved_name)
    check_argument("saved_name", saved_name, callable_or_none, "expected a function of a saved key")
    is_time = isinstance(timeout, (int, float)) and timeout > 0
    check_argument("timeout", timeout, is_time, "expected a number of seconds above 0")
    is_count = isinstance(world_size, int) and world_size > 0
    check_argument("world_size", world_size, is_count, RANKS)
    is_number = isinstance(watch_steps, int) and watch_steps >= 0
    check_argument("watch_steps", watch_steps, is_number, _STEPS)
    check_argument("cwd", str(cwd), directory.is_dir(), "there is no such directory")
    is_mapping = isinstance(environment, Mapping)
    check_argument("environment", environment, is_mapping, "expected a mapping of names to texts")
    are_texts = _are_texts([*environment.values()])
    check_argument("environment", environment, are_texts, "expected texts")
    _check_pattern(fails)
    _check_single_arguments(args)


def _name_of_run(script: str | Path, arguments: Sequence[str]) -> str:
    """Return a name for the directory of a run: that of the script or module."""
    if script == "-m" and arguments:
        return arguments[0]
    return Path(script).stem


def _check_pattern(fails: str) -> None:
    """Raise UsageProblem unless ``fails`` is a regular expression."""
    try:
        re.compile(fails)
    except (re.error, TypeError) as error:
        raise UsageProblem(
            f"fails={fails!r:.200}: expected a regular expression ({error})"
        ) from None


def _check_single_arguments(args: Sequence[object]) -> None:
    """Raise UsageProblem for an argument of the script that is a collection of several."""
    for argument in args:
        if isinstance(argument, (list, tuple, dict, set)):
            raise UsageProblem(
                f"{argument!r:.200} is given as one argument: "
                "launch(script, *args) takes them one by one"
            )


def _uses_configuration(
    launcher: str, arguments: Sequence[str], configuration: str | Path | None, strategy: str
) -> bool:
    """Tell whether the run needs a configuration file, given or made.

    Raises UsageProblem if one is given that nothing uses, or if an argument stands for one that
    there will not be.
    """
    named = any("{configuration}" in argument for argument in arguments)
    # Make no file that is not used: a script may do what no file can describe (fp8 under
    # DeepSpeed).
    is_read = named or launcher == "accelerate"
    if configuration and not is_read:
        unused = f"launcher {launcher!r} takes none, and no argument has {{configuration}} in it"
        raise UsageProblem(f"configuration={str(configuration)!r} is not used: {unused}")
    can_exist = bool(strategy or configuration)
    if named and not can_exist:
        raise UsageProblem(
            "{configuration} stands for no file: give configuration=, or strategy= to have one made"
        )
    return is_read and can_exist


#: What a number of ranks must be, and one of steps.
RANKS = "expected a number of ranks, 1 or more"
_STEPS = "expected a number of steps, 0 for no probe"


def check_argument(name: str, value: object, valid: bool, problem: str) -> None:
    """Raise UsageProblem with the name, the value and the problem, unless the argument is valid."""
    if not valid:
        raise UsageProblem(f"{name}={value!r:.200}: {problem}")


def _are_texts(values: object) -> bool:
    """Tell whether these are a tuple or a list of texts."""
    if not isinstance(values, (tuple, list)):
        return False
    return all(isinstance(value, str) for value in values)


def _cell(
    strategy: str, precision: str, world_size: int, options: Mapping[str, OptionValue]
) -> Cell:
    """Return the cell that should be running; it is of ``ddp`` without a strategy.

    Raises:
        UsageProblem: The cell is invalid.
    """
    PRECISIONS.get(precision)
    if strategy:
        STRATEGIES.get(strategy)
    if not isinstance(options, Mapping):
        raise UsageProblem(f"options={options!r:.200}: expected a mapping of names to values")
    cell = Cell(strategy or "ddp", precision, world_size, tuple(options.items()))
    problem = STRATEGIES.get(cell.strategy).unsupported_reason(cell)
    if problem:
        raise UsageProblem(f"{cell.id}: {problem}")
    return cell


def _reproduce(line: tuple[str, ...], environment: Mapping[str, str], device: str) -> str:
    """Return the shell command that repeats the run.

    It has the variables that ``launch`` has added.
    """
    if device == "cpu":
        environment = on_device(environment, device)
    variables = []
    for name, value in environment.items():
        variables.append(f"{name}={value}")
    return shlex.join(["env", *variables, *line])


LAUNCHERS = ("torchrun", "accelerate", "cli")


def command_line(
    script: str,
    args: Sequence[str],
    launcher: str,
    *,
    world_size: int,
    directory: Path,
    configuration: Path | None,
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the command line that runs ``script`` on ranks, and its variables.

    Logs go below ``directory``. A ``cli`` command that ends in torchrun gets the number of ranks by
    torchrun's own variables (``PET_*``,
    https://docs.pytorch.org/docs/stable/elastic/run.html).

    Raises:
        UsageProblem: The launcher is unknown, or the script or command is missing.
    """
    logs = directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    environment = {"PET_LOG_DIR": str(logs), "PET_REDIRECTS": "3"}
    if launcher == "cli":
        environment |= {"PET_NPROC_PER_NODE": str(world_size), "PET_STANDALONE": "1"}
        return (_executable(script), *args), environment
    if script == "-m" and not args:
        raise UsageProblem("'-m' needs the name of a module after it")
    if script != "-m" and not Path(script).is_file():
        raise UsageProblem(
            f"there is no script {script!r}; "
            "a module goes by '-m', 'name', a command by launcher='cli'"
        )
    if launcher == "torchrun":
        # Standalone: the kernel chooses the port, so that two runs at a time cannot connect to each
        # other.
        start = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(world_size),
        ]
    elif launcher == "accelerate":
        start = [sys.executable, "-m", "accelerate.commands.launch"]
        # It ignores torchrun's variables, but has these two of torchrun's options.
        start += [
            "--num_processes",
            str(world_size),
            "--main_process_port",
            "0",
            "--tee",
            "3",
            "--log_dir",
            str(logs),
        ]
        if configuration is not None:
            start += ["--config_file", str(configuration)]
    else:
        raise UsageProblem(f"no launcher named {launcher!r}. Known: {', '.join(LAUNCHERS)}")
    if script != "-m":
        script = str(Path(script).resolve())
    return (*start, script, *args), environment


def _executable(command: str) -> str:
    """Return the path of a command. Raises UsageProblem if there is none."""
    # This Python's environment need not be activated.
    executable = shutil.which(command) or shutil.which(
        command, path=str(Path(sys.executable).parent)
    )
    if executable is None:
        raise UsageProblem(f"there is no command {command!r} on the PATH")
    return executable


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of one rank.

    A launcher that inherits them would take itself for a rank.
    """
    variables: dict[str, str] = {}
    for name, value in environment.items():
        of_a_rank = OF_THE_AGENT.fullmatch(name) or name.startswith(("TORCHELASTIC_", "PET_"))
        if not of_a_rank:
            variables[name] = value
    return variables
