"""``Source`` and ``Field``: objects of libraries whose fields the sweep tries, and these fields.

A driver, the class by which a trainer is tested, lists in its attribute ``sources`` the objects
that it configures its libraries with::

    Source("AdamW", "torch.optim.AdamW", ("ddp", "fsdp2"))

A user's driver may do so too, by ``pytest_distcompat.settings``. ``reading.py`` reads from the
installed release which fields such an object has, for example
``Field("AdamW.amsgrad", "bool", "false", ("true",), ("ddp", "fsdp2"), "fp32")``. ``rules.py`` makes
settings of them. A cell, one configuration under test, has settings in its option ``set``:
``fsdp2-fp32-w2-set_AdamW.amsgrad=true``. The driver asks its cell for them when it makes the object
(``Cell.with_settings("AdamW", arguments)``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """An object whose fields a driver sets.

    Attributes:
        name: How a setting names it: ``ds_config`` in
            ``ds_config.zero_optimization.overlap_comm=false``.
        target: Its import path: a dataclass, a pydantic model, a function, or a class with keyword
            arguments.
        strategies: The strategies under which the driver makes it.
        kind: ``fields``; ``subclasses``, if ``target`` is the base of the classes that are meant;
            ``keys``, if ``target`` reads a dictionary whose keys are the fields; ``environment``
            for the variables that ``target`` reads when it is made.
        precision: The precision of the cells in which the sweep tries its fields: ``bf16_upcast``
            for an object that only mixed precision uses.
        becomes: The import path of a function from what ``target`` makes to the settings of
            ``ds_config`` (DeepSpeed's JSON) that come of it; empty if none do. ``DeepSpeedPlugin``
            of accelerate, for example, becomes JSON.
        only: The names of the fields that are meant; empty for all.
    """

    name: str
    target: str
    strategies: tuple[str, ...]
    kind: str = "fields"
    precision: str = "fp32"
    becomes: str = ""
    only: tuple[str, ...] = ()

    def names(self, setting: str, strategy: str) -> bool:
        """Tell whether a setting is one of this object, or of DeepSpeed's JSON if that comes of it.

        ``law`` asks it which driver may have a setting, without importing any library. So the
        answer is False for ``subclasses``, whose names only the library knows.

        Args:
            setting: The full name of a setting, also with its value: ``AdamW.amsgrad=true``. That
                of a variable begins with ``env.``.
            strategy: The strategy of the cell. Only under ZeRO does an object become JSON.
        """
        if self.becomes and strategy.startswith("zero") and setting.startswith("ds_config."):
            return True
        if self.kind == "subclasses":
            return False
        prefix = "env" if self.kind == "environment" else self.name
        name, _, _ = setting.partition("=")
        owner, _, field = name.partition(".")
        return owner == prefix and self.means(field)

    def means(self, field: str) -> bool:
        """Tell whether a field is one of those that are meant (``only``), ``amsgrad`` say."""
        return not self.only or field in self.only


@dataclass(frozen=True)
class Field:
    """A field of a source.

    Attributes:
        name: Its full name: ``ds_config.zero_optimization.overlap_comm``, or ``env.NAME`` for an
            environment variable.
        type: Its type, as text: ``bool | None``.
        default: Its default, as text: ``null``.
        values: Other values than the default, as text: ``("true", "false")``; empty if its type
            does not say any.
        strategies: As in the source.
        precision: As in the source.
        places: The full names of other settings that say the same: for an argument, the keys of
            DeepSpeed's JSON that it changes; for a variable, the argument.
    """

    name: str
    type: str
    default: str
    values: tuple[str, ...]
    strategies: tuple[str, ...]
    precision: str
    places: tuple[str, ...] = ()
