"""Command lines that run a script on several ranks, such as ``torchrun ... train.py``.

``launch`` (module ``launching``) calls ``command_line`` with what the user gave it, and runs the
result. For ``launch("train.py", "--lr", "1", launcher="torchrun")`` on two ranks that is

    python -m torch.distributed.run --standalone --nproc-per-node 2 /path/train.py --lr 1

with environment variables that send the logs of the ranks to files. A *rank* is one of the
processes of the script that train together.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_distcompat.failures import UsageProblem, hides_frames
from pytest_distcompat.launch.environment import OF_THE_AGENT
from pytest_distcompat.launch.process import on_device

#: pytest looks for this name: https://docs.pytest.org/en/stable/example/simple.html
__tracebackhide__ = hides_frames

#: The values of ``launch(launcher=...)``.
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
    """Return the command line that runs ``script`` on ranks, and its environment variables.

    torchrun reads each of its options from a variable too (``PET_*``,
    https://docs.pytorch.org/docs/stable/elastic/run.html). Two of them send the ranks' stdout and
    stderr to files below ``directory``; with them a ``cli`` command that ends in torchrun also
    gets the number of ranks.

    Args:
        script: The path of a script; ``-m``; or a command, such as ``trl``, for ``cli``.
        args: The arguments of the script; after ``-m`` the module first.
        launcher: One of ``LAUNCHERS``.
        world_size: The number of ranks.
        directory: The directory of the run.
        configuration: The file for ``accelerate launch``, None for none.

    Raises:
        UsageProblem: The launcher is unknown, or the script or command is missing.
    """
    logs = directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    # 3 is torchrun's number for both stdout and stderr.
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
        start = _start_of_torchrun(world_size)
    elif launcher == "accelerate":
        start = _start_of_accelerate(world_size, logs, configuration)
    else:
        raise UsageProblem(f"no launcher named {launcher!r}. Known: {', '.join(LAUNCHERS)}")
    if script != "-m":
        script = str(Path(script).resolve())
    return (*start, script, *args), environment


def _start_of_torchrun(world_size: int) -> list[str]:
    """Return the command line of torchrun up to the script."""
    # Standalone: the kernel chooses the port, so that two runs at a time cannot connect to each
    # other.
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(world_size),
    ]


def _start_of_accelerate(world_size: int, logs: Path, configuration: Path | None) -> list[str]:
    """Return the command line of ``accelerate launch`` up to the script."""
    # accelerate ignores torchrun's variables, but has two of torchrun's options for logs. With port
    # 0 the kernel chooses the port.
    start = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
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
    return start


def _executable(command: str) -> str:
    """Return the path of a command. Raises UsageProblem if there is none."""
    executable = shutil.which(command)
    if not executable:
        # A virtual environment that is not activated has its commands beside its Python only.
        executable = shutil.which(command, path=str(Path(sys.executable).parent))
    if executable is None:
        raise UsageProblem(f"there is no command {command!r} on the PATH")
    return executable


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of one rank, such as ``RANK``.

    pytest itself may run as a rank, under torchrun. A launcher that inherits its variables would
    take itself for a rank.
    """
    variables: dict[str, str] = {}
    for name, value in environment.items():
        of_a_rank = OF_THE_AGENT.fullmatch(name) or name.startswith(("TORCHELASTIC_", "PET_"))
        if not of_a_rank:
            variables[name] = value
    return variables


def reproduce(line: tuple[str, ...], environment: Mapping[str, str], device: str) -> str:
    """Return the shell command that repeats a run: ``env NAME=VALUE ... torchrun ...``.

    Args:
        line: The command line of the run.
        environment: The variables that ``launch`` has added to those of this process.
        device: ``cpu`` or ``cuda``.
    """
    if device == "cpu":
        # The user's shell may see GPUs, which the run must not use.
        environment = on_device(environment, device)
    variables = []
    for name, value in environment.items():
        variables.append(f"{name}={value}")
    return shlex.join(["env", *variables, *line])
