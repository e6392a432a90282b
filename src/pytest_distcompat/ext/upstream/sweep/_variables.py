"""Environment variables that an object of a library reads when it is made, found by making it.

The sweep tries each setting of the objects that a driver (the class by which a trainer is tested)
configures its libraries with. Some can be set by environment variables too: accelerate's plugins
read ``FSDP_VERSION`` and others when they are made. ``reading.py`` calls ``variables_of(source,
target)``, in the process that imports the libraries. It makes the object while ``os.environ``
records what is looked up; then it makes the object again with each of these variables at each value
that any field may have. A variable that changes a field is a setting, ``env.FSDP_VERSION=2``; the
field is another place for the same.
"""

from __future__ import annotations

import enum
import inspect
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from pytest_distcompat.ext.upstream.sweep._keys import Recorder
from pytest_distcompat.ext.upstream.sweep._members import Member, members_of
from pytest_distcompat.ext.upstream.sweep.fields import Field, Source
from pytest_distcompat.ext.upstream.sweep.values import text, values_to_try


def variables_of(source: Source, target: Any) -> Iterator[Field]:
    """Yield the environment variables that change a field of what ``target`` makes.

    Each has the values that ``target`` accepts.

    Args:
        source: The object's name in settings, and the strategies under which a driver makes it.
        target: The class of the object, such as ``FullyShardedDataParallelPlugin``.
    """
    # Names of fields, and the values to try for each, spelled as a variable has them.
    spellings_by_field: dict[str, list[str]] = {}
    all_spellings: dict[str, None] = {}
    for member in members_of(target):
        spellings = _variable_spellings(member)
        spellings_by_field[member.name] = spellings
        all_spellings.update(dict.fromkeys(spellings))
    # The first time, the variables of what it imports are read too: that object is not used.
    _in_environment(target, {}, {})
    # Gets the variables that are looked up while the object is made.
    variables: dict[str, Any] = {}
    base = _in_environment(target, {}, variables)
    # A field that differs from call to call, as an object of its own, says nothing of a variable.
    again = _in_environment(target, {}, {})
    stable_fields = [name for name in spellings_by_field if base[name] == again[name]]
    for variable in variables:
        # Value of the variable -> the fields of the object that is made with it.
        made_by_spelling = {}
        for spelling in all_spellings:
            made = _in_environment(target, {variable: spelling}, {})
            if made:
                made_by_spelling[spelling] = made
        changed = _changed_field(stable_fields, base, made_by_spelling.values())
        if changed is None:
            continue
        accepted = []
        for spelling in dict.fromkeys(spellings_by_field[changed]):
            # ``null`` spells None, which no variable can be.
            if spelling in made_by_spelling and spelling != "null":
                accepted.append(spelling)
        if accepted:
            places = (f"{source.name}.{changed}",)
            yield Field(
                name=f"env.{variable}",
                type="str",
                default="",
                values=tuple(accepted),
                strategies=source.strategies,
                precision=source.precision,
                places=places,
            )


def _variable_spellings(member: Member) -> list[str]:
    """Return the values to try as an environment variable has them.

    Of an enumeration's member that is the name alone.
    """
    spellings = []
    for value in values_to_try(member.type, member.default):
        spelling = text(value)
        if isinstance(value, enum.Enum):
            _, _, spelling = spelling.rpartition(".")
        spellings.append(spelling)
    return spellings


def _changed_field(
    names: Iterable[str], base: Mapping[str, Any], others: Collection[Mapping[str, Any]]
) -> str | None:
    """Return the first field that has another value in any of the others; None if none has.

    Args:
        names: Names of fields.
        base: Value by field.
        others: The same of other objects.
    """
    for name in names:
        if any(fields[name] != base[name] for fields in others):
            return name
    return None


def _in_environment(
    target: Any, variables: Mapping[str, str], read: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of what is made with some environment variables, by name.

    Args:
        target: It is called without arguments.
        variables: The variables that are set meanwhile.
        read: Gets the variables that ``target`` reads, with their defaults.

    Returns:
        Nothing if ``target`` raises.
    """
    was = os.environ
    # A copy: what the library sets meanwhile is forgotten.
    os.environ = Recorder({**was, **variables}, read)  # type: ignore[assignment]  # noqa: B003
    try:
        made = target()
    except Exception:
        return {}
    finally:
        os.environ = was  # noqa: B003
    return {name: getattr(made, name, None) for name in inspect.signature(target).parameters}
