"""Options of the plugin, from the command line, ini file or default, in that order.

``pytest_addoption`` calls ``add``, which registers the options of the core (``core_options``) and
those of extensions. All other modules read them by ``setting(config, "distcompat_timeout")``,
mostly through ``DistcompatSession.setting("timeout")``. Each option is a text first, as ``"300"``,
whose ``Option.read`` returns the value, here ``300.0``. Each can be given in three ways::

    pytest --distcompat-timeout=300      # the command line
    distcompat_timeout = 300             # an ini key, in pyproject.toml or pytest.ini
                                         # neither: Option.default
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.plugin.core_options import OPTIONS
from pytest_distcompat.plugin.option import Option, Setting, choice, count

# The names that other modules and extensions use. Some are defined in the two modules above.
__all__ = [
    "OPTIONS",
    "Option",
    "RegisteredOptions",
    "Setting",
    "add",
    "choice",
    "count",
    "given",
    "options_of",
    "setting",
]


#: The name under which pytest's plugin manager has the ``RegisteredOptions``.
_REGISTERED = "distcompat-options"


@dataclass(eq=False)
class RegisteredOptions:
    """The options of one pytest process: those of the core, and those of its extensions.

    It is registered as a plugin without hooks, because the plugin manager is all that
    ``pytest_addoption`` and later hooks have in common.
    """

    parser: pytest.Parser
    #: The options by the name of their ini key.
    by_name: dict[str, Option] = field(default_factory=dict)

    def add(self, options: Iterable[Option]) -> None:
        """Register options, each on the command line and as an ini key."""
        group = self.parser.getgroup("distcompat", "distributed compatibility")
        for option in options:
            self.by_name[option.name] = option
            action = "append" if option.repeated else "store"
            # None, not ``option.default``, so that ``setting`` sees that an option was not given.
            # ``flags`` and ``names`` also have the option's alias, if it has one.
            group.addoption(
                *option.flags,
                dest=option.name,
                default=None,
                metavar=option.metavar,
                help=option.help,
                action=action,
            )
            for key in option.names:
                self.parser.addini(key, option.help, default=None)


def add(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the options of the core and of the extensions.

    The hook is historic: pluggy also calls it on an extension that is loaded later.
    """
    registered = RegisteredOptions(parser)
    registered.add(OPTIONS.values())
    pluginmanager.register(registered, _REGISTERED)
    # ``registered.add`` is called with what each extension returns: its options.
    pluginmanager.hook.pytest_distcompat_options.call_historic(registered.add, {})


def options_of(config: pytest.Config) -> dict[str, Option]:
    """Return all options of a pytest, by the name of their ini key."""
    registered: RegisteredOptions | None = config.pluginmanager.getplugin(_REGISTERED)
    assert registered is not None
    return registered.by_name


def setting(config: pytest.Config, name: str) -> Setting:
    """Return the effective value of an option.

    Args:
        config: The configuration of pytest.
        name: The ini key of the option, as ``distcompat_timeout``.

    Raises:
        pytest.UsageError: The value is wrong; the message names the allowed ones.
    """
    option = options_of(config)[name]
    given = config.getoption(name)
    ini = _in_file(config, option)
    # An empty value on the command line overrides the file too: no baseline this time, or an unset
    # shell variable.
    if given is not None:
        # A conftest may have set it to another type.
        text = "\n".join(given) if option.repeated else str(given)
        origin = "option"
        where = option.flag
    elif ini:
        text = str(ini)
        origin = "ini"
        where = f"ini {name}"
    else:
        text = option.default
        origin = "default"
        where = name
    try:
        # A file may be relative, so its parser also gets the directory to start from.
        if option.metavar.startswith("FILE"):
            value = option.read(text, _base(config, origin))
        else:
            value = option.read(text)
    except UsageProblem as problem:
        raise pytest.UsageError(f"{where}: {problem}") from None
    return Setting(value, ", ".join(text.split("\n")), origin)


def _base(config: pytest.Config, origin: str) -> Path:
    """Return the directory that relative paths start from; ``origin`` is that of the ``Setting``.

    Paths in the ini file start from the file's directory, wherever pytest is started:
    https://docs.pytest.org/en/stable/reference/reference.html#pytest.Parser.addini
    """
    file = config.inipath if origin == "ini" else None
    # Relative paths stay relative where possible: messages show them as they were written.
    if file is None or file.parent == config.invocation_params.dir:
        return Path()
    return file.parent


def given(config: pytest.Config) -> Sequence[str]:
    """Return the ini keys of the options that are set by command line or ini file."""
    names: list[str] = []
    for name, option in options_of(config).items():
        if config.getoption(name) is not None or _in_file(config, option):
            names.append(name)
    return names


def _in_file(config: pytest.Config, option: Option) -> str | None:
    """Return the text that the ini file has for an option; None if it sets none of its names."""
    for name in option.names:
        text: str | None = config.getini(name)
        if text:
            return text
    return None
