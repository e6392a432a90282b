"""Description of pytest's session: plain data from which a rank makes the same session.

A test with ``@pytest.mark.distcompat`` does not run in pytest's process. It runs on *ranks*: the
processes of one torchrun process group. Each rank needs a pytest session of its own, with the same
options, plugins and items. ``describe`` makes its description in pytest's process (or in an xdist
worker). The description goes two ways. ``DistcompatSession`` gives it to the fork server, the
process that ranks are forked from, and writes it to a file, for ranks that must make the session
themselves, as under the cold command ``torchrun``. There ``rank_session.collect`` makes the session
from it.
"""

from __future__ import annotations

import argparse
import base64
import os
import pickle
import shlex
import sys
from typing import Any

import pytest


def describe(config: pytest.Config) -> dict[str, Any]:
    """Return plain data (JSON) from which ``collect`` makes the same session in another process.

    Returns:
        A dictionary with these keys:

        - ``options``: The options with values of built-in types, ``{"keyword": "names"}``, pickled
          and in base64.
        - ``objects``: The options of other types: name to pickled value, in base64.
        - ``args``: The paths and node ids to collect, as ``["tests/test_a.py"]``.
        - ``argv``: ``sys.argv`` of this process.
        - ``given``: The arguments of pytest's command line.
        - ``worker``: What xdist says to this worker (``config.workerinput``), such as
          ``{"workerid": "gw0"}``; empty in any other process.
        - ``cwd``: The directory in which pytest was started.
        - ``markers``: The lines of the ini key ``markers``, with those that plugins have added.
        - ``files``: The patterns of the ini key ``python_files``, as ``["test_*.py"]``.

    Raises:
        pytest.UsageError: An option has a value that cannot be handed to another process.
    """
    # Two dictionaries, because ``collect`` unpickles them at two times. To unpickle an object may
    # import the conftest.py that defines its type, which pytest must import first. So ``values`` is
    # one pickle, and of ``objects`` each value.
    values, objects = {}, {}
    for name, value in vars(config.option).items():
        if _is_builtin(value):
            values[name] = value
            continue
        try:
            objects[name] = base64.b64encode(pickle.dumps(value)).decode()
        except Exception as error:
            # A default is left out: the other process makes the same one from the same plugins.
            if not _is_default(config, name, value):
                raise pytest.UsageError(
                    f"the option {name!r} has a value that cannot be handed to ranks: "
                    f"{value!r:.200} "
                    f"({type(error).__name__}: {error}); expected one that can be pickled"
                ) from None
    # The worker's id and the number of workers are among these; what plugins add may be no JSON.
    workerinput = getattr(config, "workerinput", {})
    worker = {name: value for name, value in workerinput.items() if isinstance(value, (str, int))}
    return {
        "options": base64.b64encode(pickle.dumps(values)).decode(),
        "objects": objects,
        "args": [str(argument) for argument in config.args],
        "argv": list(sys.argv),
        "given": [str(argument) for argument in config.invocation_params.args],
        "worker": worker,
        "cwd": str(config.invocation_params.dir),
        "markers": list(config.getini("markers")),
        "files": list(config.getini("python_files")),
    }


def _is_builtin(value: object) -> bool:
    """Tell whether a value consists of built-in types, so that to unpickle it imports nothing."""
    kind = type(value)
    if isinstance(value, (list, tuple, set)):
        return kind in {list, tuple, set} and all(map(_is_builtin, value))
    if isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
        return kind is dict and all(map(_is_builtin, parts))
    return kind in {str, int, float, bool, bytes, type(None)}


def _is_default(config: pytest.Config, name: str, value: object) -> bool:
    """Tell whether an option has its default, which it then has on ranks too.

    Only options whose value cannot be pickled come here. ``Config._parser`` is private;
    ``tests/plugin/test_private_names.py`` fails when it goes away.
    """
    parse = config._parser.parse_known_args  # noqa: SLF001 - see the docstring
    default = getattr(parse([]), name, None)
    if value is default or type(value) is not type(default):
        return value is default
    # argparse converts a default that is a string anew each time. So another object of the
    # default's type may be the default too. It is, if no argument has set the option: argparse
    # leaves an attribute that the namespace has already, and here it has ``unset``.
    from_environment = os.environ.get("PYTEST_ADDOPTS", "")
    given = [*config.getini("addopts"), *shlex.split(from_environment)]
    given += map(str, config.invocation_params.args)
    unset = object()
    namespace = parse(given, argparse.Namespace(**{name: unset}))
    return getattr(namespace, name, None) is unset


def own_files(config: pytest.Config) -> tuple[str, ...]:
    """Return the installed files of the project under test, as after ``pip install .``.

    The fork server imports the user's code under a watch (``at_import.Watch``): code that reads
    RANK when it is imported must be imported by each rank itself. The watch looks at the user's own
    code and not at installed libraries, so it must know these files, which are both. The project is
    that of ``pyproject.toml`` in pytest's root directory.

    Returns:
        The paths of its Python files; none if there is no such project or it is not installed.
    """
    import importlib.metadata

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        text = (config.rootpath / "pyproject.toml").read_text(encoding="utf-8")
        project = tomllib.loads(text)["project"]
        files = importlib.metadata.distribution(project["name"]).files or ()
    except (OSError, ValueError, LookupError, TypeError, importlib.metadata.PackageNotFoundError):
        return ()
    modules = []
    for file in files:
        if file.suffix == ".py":
            modules.append(str(file.locate()))
    return tuple(modules)
