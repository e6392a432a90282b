"""Keys that a function reads from a dictionary, such as DeepSpeed's JSON, found by calling it.

The sweep tries each setting of the objects that a driver configures its libraries with. Some are
not declared anywhere: DeepSpeed's JSON is a dictionary, out of which ``DeepSpeedConfig`` reads keys
by ``get``. ``reading.py`` calls ``keys_of(reader)``. It calls the reader with a ``Recorder``, a
dictionary that notes which keys are looked up with which defaults, and yields a ``Member`` for each
key, such as ``gradient_clipping``. Then it passes such a dictionary under each of
these keys, and so finds nested ones: ``fp16.initial_scale_power``. Some keys hold a pydantic model,
which declares its fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pytest_distcompat.ext.upstream.sweep._members import Member, members_of

#: A function that reads its configuration from a dictionary.
_ConfigReader = Callable[[dict[str, Any]], Any]
#: A key that no config model has, so that the model's error names the model.
_UNKNOWN_KEY = "distcompat_unknown"


class Recorder(dict[str, Any]):
    """A dictionary that records which keys are read, with their defaults.

    Attributes:
        read: Key -> the default with which it was read; None if it was read without one.
    """

    def __init__(self, given: Mapping[str, Any], read: dict[str, Any]) -> None:
        super().__init__(given)
        self.read = read

    def get(self, key: str, default: Any = None) -> Any:
        """Record the key with its default, and return its value."""
        # A key may be tested before it is read with its default.
        if self.read.get(key) is None:
            self.read[key] = default
        return super().get(key, default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Record the key with its default, and set the value if there is none."""
        self.get(key, default)
        return super().setdefault(key, default)

    def keys(self) -> Any:
        """Return this dictionary, which records what is looked up among its keys."""
        # ``key in config.keys()`` is a lookup too.
        return self

    def __contains__(self, key: object) -> bool:
        self.read.setdefault(str(key), None)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.read.setdefault(key, None)
        return super().__getitem__(key)


def keys_of(reader: _ConfigReader) -> Iterator[Member]:
    """Yield the keys that a function reads from a dictionary and from dictionaries inside it.

    Args:
        reader: Such as ``DeepSpeedConfig``. It is called many times.
    """
    read: dict[str, Any] = {}
    _call(reader, Recorder({}, read))
    for key, default in list(read.items()):
        inner_keys: dict[str, Any] = {}
        # Any other default shows that the key's value is no dictionary.
        if default is None or isinstance(default, dict):
            model = _model_of_key(reader, key)
            if model is not None:
                for member in members_of(model):
                    yield dataclasses.replace(member, name=f"{key}.{member.name}")
                continue
            # Many parts of DeepSpeed's JSON are read only if they are enabled.
            _call(reader, {key: Recorder({"enabled": True}, inner_keys)})
        if not inner_keys:
            yield Member(key, type(default), default)
        for inner_key, inner_default in inner_keys.items():
            yield Member(f"{key}.{inner_key}", type(inner_default), inner_default)


def _model_of_key(reader: _ConfigReader, key: str) -> Any:
    """Return the pydantic model that the function makes of what is under a key; None if none.

    It is found by an unknown key there: the model's error has its name as the title.
    """
    error = _call(reader, {key: {_UNKNOWN_KEY: 1}})
    model = _model_named(getattr(error, "title", ""))
    if model is None:
        return None
    # The model of the error may have the key as a field, as that of DeepSpeed's monitors has. Then
    # the place of the error, ``("tensorboard", "distcompat_unknown")``, leads to the key's model.
    for outer in error.errors()[0]["loc"][:-1]:  # type: ignore[union-attr]
        model = model.model_fields[outer].annotation
    return model


def _call(reader: _ConfigReader, config: dict[str, Any]) -> Exception | None:
    """Return the exception with which the function ends; None if it returns.

    Without a whole config it often raises; by then it has read most keys, or all.
    """
    try:
        reader(config)
    except Exception as error:
        return error
    return None


def _model_named(name: str) -> Any:
    """Return the pydantic model of that name, None if there is none."""
    if not name:
        return None
    from pydantic import BaseModel

    models: list[Any] = [BaseModel]
    # The list grows while it is read, until no subclass of a subclass is left.
    for model in models:
        if model.__name__ == name:
            return model
        models += model.__subclasses__()
    return None
