"""The options of the plugin, those of its extensions too."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

from pytest_distcompat.plugin.options import OPTIONS, Option

EXTENSIONS = "pytest_distcompat.ext."


def options_without(extensions: Iterable[str] = ()) -> dict[str, Option]:
    """Return the options of the core, then those of all extensions but these, by the name of their ini key."""
    options = dict(OPTIONS)
    for entry_point in metadata.entry_points(group="pytest11"):
        extension = entry_point.value.removeprefix(EXTENSIONS).partition(".")[0]
        if not entry_point.value.startswith(EXTENSIONS) or extension in extensions:
            continue
        plugin = entry_point.load()
        if hasattr(plugin, "pytest_distcompat_options"):
            options.update({option.name: option for option in plugin.pytest_distcompat_options()})
    return options


ALL_OPTIONS = options_without()
