"""Command lines and environments by which each launcher runs a script."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.launch.environment import OF_THE_AGENT

LAUNCHERS = ("torchrun", "accelerate", "cli")


def build(
    script: str, args: Sequence[str], launcher: str, *, world_size: int, directory: Path, configuration: Path | None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the command line that runs ``script`` on ``world_size`` ranks with logs in ``directory``, and its variables.

    A ``cli`` command that ends in torchrun gets the number of ranks by torchrun's own variables (``PET_*``,
    https://docs.pytorch.org/docs/stable/elastic/run.html). Raises UsageProblem for an unknown launcher, a missing
    script or command.
    """
    logs = directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    environment = {"PET_LOG_DIR": str(logs), "PET_REDIRECTS": "3"}
    if launcher == "cli":
        # This Python's environment need not be activated.
        executable = shutil.which(script) or shutil.which(script, path=str(Path(sys.executable).parent))
        if executable is None:
            raise UsageProblem(f"there is no command {script!r} on the PATH")
        environment |= {"PET_NPROC_PER_NODE": str(world_size), "PET_STANDALONE": "1"}
        return (executable, *args), environment
    target = _target(script, args)
    if launcher == "torchrun":
        # Standalone: the kernel chooses the port, so that two runs at a time cannot connect to each other.
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        return (*start, *target), environment
    if launcher == "accelerate":
        start = [sys.executable, "-m", "accelerate.commands.launch"]
        # It ignores torchrun's variables, but has these two of torchrun's options.
        start += ["--num_processes", str(world_size), "--main_process_port", "0", "--tee", "3", "--log_dir", str(logs)]
        if configuration is not None:
            start += ["--config_file", str(configuration)]
        return (*start, *target), environment
    raise UsageProblem(f"no launcher named {launcher!r}. Known: {', '.join(LAUNCHERS)}")


def _target(script: str, args: Sequence[str]) -> tuple[str, ...]:
    """Return the absolute path of the script, or ``-m module``, with its arguments."""
    if script == "-m":
        if not args:
            raise UsageProblem("'-m' needs the name of a module after it")
        return ("-m", *args)
    if not Path(script).is_file():
        raise UsageProblem(f"there is no script {script!r}; a module goes by '-m', 'name', a command by launcher='cli'")
    return (str(Path(script).resolve()), *args)


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of one rank: a launcher that inherits them would take itself for a rank."""
    ranks = {name for name in environment if OF_THE_AGENT.fullmatch(name) or name.startswith(("TORCHELASTIC_", "PET_"))}
    return {name: value for name, value in environment.items() if name not in ranks}
