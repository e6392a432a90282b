"""Checks of the arguments of ``launch``, ``resume_roundtrip`` and ``parity``.

These functions are called with whatever a user's test passed, before anything runs. Each raises
``UsageProblem``, with the argument's name and value, for a wrong one, such as ``timeout=-1:
expected a number of seconds above 0``. Three also return what the launch works with:
``expected_cell``, ``extra_states`` and ``uses_configuration``.

A *cell* says what should run: ``fsdp2-fp32-w2`` is FSDP2 in float32 on 2 *ranks*, the processes
that train together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_distcompat.cell import Cell, OptionValue
from pytest_distcompat.failures import UsageProblem, hides_frames
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import ExtraState

#: pytest looks for this name: https://docs.pytest.org/en/stable/example/simple.html
__tracebackhide__ = hides_frames

#: What a number of ranks must be: the end of a message.
RANKS = "expected a number of ranks, 1 or more"
#: What ``watch_steps`` must be, the number of optimizer steps that the probe records: the code of
#: this package that watches the script on each rank.
_STEPS = "expected a number of steps, 0 for no probe"


def check_launch_arguments(
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

    The arguments are those of ``launch``, with the defaults of its host filled in: ``blocks`` are
    class names of modules, ``saved_name`` maps a key of a saved file to the model's name, ``fails``
    is a regular expression for how the run must fail. ``directory`` is the working directory, which
    is ``cwd`` if that is given.
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


def check_argument(name: str, value: object, valid: bool, problem: str) -> None:
    """Raise UsageProblem with the name, the value and the problem, unless the argument is valid.

    For example ``check_argument("steps", -1, False, "expected a number of steps")``.
    """
    if not valid:
        raise UsageProblem(f"{name}={value!r:.200}: {problem}")


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


def _are_texts(values: object) -> bool:
    """Tell whether ``values`` is a tuple or a list of strings; a single string is not."""
    if not isinstance(values, (tuple, list)):
        return False
    return all(isinstance(value, str) for value in values)


def extra_states(given: object) -> dict[str, ExtraState]:
    """Return what is expected of each variable that ``launch(extra_state=...)`` names.

    Args:
        given: One name, such as ``"ema"`` or ``"trainer.ema"``; a list or tuple of names; or a
            mapping of names to ``ExtraState``, which says whether the value changes, is alike on
            all ranks, and comes back by a load. A name without an ``ExtraState`` has all three.

    Raises:
        UsageProblem: It is something else.
    """
    names = (given,) if isinstance(given, str) else given
    if isinstance(names, Mapping):
        states = dict(names)
    elif isinstance(names, (list, tuple)):
        states = dict.fromkeys(names, ExtraState())
    else:
        # Of another type: the loop rejects this entry.
        states = {None: given}
    for name, expected in states.items():
        is_valid = _is_variable(name) and isinstance(expected, ExtraState)
        problem = "expected names of variables, or a mapping of them to ExtraState"
        check_argument("extra_state", given, is_valid, problem)
    return states


def _is_variable(name: object) -> bool:
    """Tell whether ``name`` may name a variable or an attribute of one: ``trainer.ema``."""
    if not isinstance(name, str):
        return False
    return all(part.isidentifier() for part in name.split("."))


def expected_cell(
    strategy: str, precision: str, world_size: int, options: Mapping[str, OptionValue]
) -> Cell:
    """Return the cell that should be running: the strategy, precision, number of ranks and options.

    For example ``fsdp2-fp32-w2``, FSDP2 in float32 on 2 ranks. Without a strategy it is a cell of
    ``ddp``, which stands for any training on that many ranks.

    Raises:
        UsageProblem: The strategy, precision or an option is unknown, or they do not go together.
    """
    # Only called to raise for an unknown name.
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


def uses_configuration(
    launcher: str, arguments: Sequence[str], configuration: str | Path | None, strategy: str
) -> bool:
    """Tell whether the run needs a configuration file of accelerate.

    ``accelerate launch`` reads one, and any command may get its path by ``{configuration}`` in an
    argument. The user gives the file, or ``launch`` makes one for the strategy.

    Args:
        launcher: ``torchrun``, ``accelerate`` or ``cli``.
        arguments: The arguments of the script.
        configuration: The file that the user gives, or None.
        strategy: The strategy that should be running; empty if the user names none.

    Raises:
        UsageProblem: A file is given that nothing uses, or ``{configuration}`` stands for a file
            that is not given, and cannot be made without a strategy.
    """
    named = any("{configuration}" in argument for argument in arguments)
    # A file that nothing reads must not be made: for some cells that is an error, as no file can
    # describe them (fp8 under DeepSpeed), while a script can train them.
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
