"""How a script or a command line is called by each launcher, and in which environment."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_distcompat.failures import UsageProblem

LAUNCHERS = ("torchrun", "accelerate", "cli")

#: What belongs to one process group: a launcher that inherits it would take itself for a rank.
_OF_A_RANK = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class Command:
    """A command line, and what its environment has besides the user's own."""

    line: tuple[str, ...]
    environment: Mapping[str, str]


def build(
    script: str, args: Sequence[str], launcher: str, *, world_size: int, directory: Path, configuration: Path | None
) -> Command:
    """The command that runs ``script`` with ``args`` on so many ranks.

    ``torchrun`` and ``accelerate`` take a path, or ``module`` after ``-m``; ``cli`` any command, which is told by torchrun's
    own variables (``PET_*``, https://docs.pytorch.org/docs/stable/elastic/run.html) how many ranks to start, where torchrun is
    what it ends in. Raises UsageProblem for an unknown launcher, a script that is not there, and a command that is not installed.
    """
    logs = directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    environment = {"PET_LOG_DIR": str(logs), "PET_REDIRECTS": "3"}
    if launcher == "cli":
        found = shutil.which(script) or _beside_python(script)
        if found is None:
            raise UsageProblem(f"there is no command {script!r} on the PATH")
        environment |= {"PET_NPROC_PER_NODE": str(world_size), "PET_STANDALONE": "1"}
        return Command((found, *args), environment)
    what = _target(script, args)
    if launcher == "torchrun":
        # Standalone: a port that the kernel chooses, so that two runs at a time do not meet.
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        return Command((*start, *what), environment)
    if launcher == "accelerate":
        start = [sys.executable, "-m", "accelerate.commands.launch"]
        # It takes no word of torchrun's variables, but has these two of torchrun's options.
        start += ["--num_processes", str(world_size), "--main_process_port", "0", "--tee", "3", "--log_dir", str(logs)]
        if configuration is not None:
            start += ["--config_file", str(configuration)]
        return Command((*start, *what), environment)
    raise UsageProblem(f"no launcher named {launcher!r}. Known: {', '.join(LAUNCHERS)}")


def _target(script: str, args: Sequence[str]) -> tuple[str, ...]:
    """A path to a script, or ``-m module``."""
    if script == "-m":
        if not args:
            raise UsageProblem("'-m' needs the name of a module after it")
        return ("-m", *args)
    if not Path(script).is_file():
        raise UsageProblem(f"there is no script {script!r}; a module goes by '-m', 'name', a command by launcher='cli'")
    return (str(Path(script).resolve()), *args)


def _beside_python(name: str) -> str | None:
    """A command of the environment that this Python belongs to, which need not be activated."""
    return shutil.which(name, path=str(Path(sys.executable).parent))


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """That environment without what makes its process a rank of another group."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _OF_A_RANK and not name.startswith(("TORCHELASTIC_", "PET_"))
    }
