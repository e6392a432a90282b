"""Reports of format 1: keys and cell ids as format 2 spells them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

#: The keys that changed, by the part of the document that has them.
_DOCUMENT = {"run": "session", "lives": "runs"}
_SESSION = {"lives": "runs"}
_CELL = {"lives": "runs", "blanks": "not_applicable"}
_PARAMETER = {"plain": "unwrapped"}
_RUN = {"verb": "action"}

#: The options that changed, as cell ids spell them.
_OPTIONS = {
    "accumulate_2": "grad_accum_2",
    "accumulate_4": "grad_accum_4",
    "adapter": "lora",
    "groups": "param_groups",
    "ignored": "ignored_modules",
    "model_plain": "model_mlp",
    "offload": "cpu_offload",
    "replicate_2": "dp_replicate_2",
    "wrap_size": "wrap_policy_size",
}
#: The options in a cell id: all that follows its world size.
_OPTIONS_OF_CELL = re.compile(r"(?<=-w)\d+(?:-\w+)+")


def from_format_1(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document in format 2.

    Values of a wrong type stay as they are: ``Report.from_json`` reports them.

    Args:
        document: The JSON of a report whose ``format`` is 1.
    """
    converters: dict[str, Callable[[Any], Any]] = {
        "session": _session,
        "results": lambda results: _each(results, _result),
        "cells": lambda cells: _each(cells, _cell),
        "runs": lambda runs: _each(runs, _run),
        "unreached": lambda nodeids: _each(nodeids, _current_id),
    }
    return {**_convert(_renamed(document, _DOCUMENT), converters), "format": 2}


def _session(session: Any) -> Any:
    merged = {"merged": lambda sessions: _each(sessions, lambda one: _renamed(one, _SESSION))}
    return _convert(_renamed(session, _SESSION), merged)


def _result(result: Any) -> Any:
    return _convert(result, dict.fromkeys(("cell", "nodeid", "reproduce"), _current_id))


def _cell(cell: Any) -> Any:
    names = {"names": lambda parameters: _each(parameters, lambda one: _renamed(one, _PARAMETER))}
    return _convert(_renamed(cell, _CELL), {"cell": _current_id, **names})


def _run(run: Any) -> Any:
    return _convert(_renamed(run, _RUN), {"cell": _current_id})


def _renamed(data: Any, names: Mapping[str, str]) -> Any:
    return {names.get(key, key): value for key, value in data.items()} if isinstance(data, Mapping) else data


def _convert(data: Any, converters: Mapping[str, Callable[[Any], Any]]) -> Any:
    """Return the object with each of its values converted by the function for its key."""
    if not isinstance(data, Mapping):
        return data
    return {key: converters[key](value) if key in converters else value for key, value in data.items()}


def _each(values: Any, convert: Callable[[Any], Any]) -> Any:
    return [convert(one) for one in values] if isinstance(values, list) else values


def _current_id(text: Any) -> Any:
    """Return a text with the cell ids in it as they read now."""
    return _OPTIONS_OF_CELL.sub(_current_options, text) if isinstance(text, str) else text


def _current_options(found: re.Match[str]) -> str:
    return "-".join(_OPTIONS.get(token, token) for token in found[0].split("-"))
