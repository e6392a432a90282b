"""Reports of format 1: keys and cell ids as format 2 spells them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: The keys that changed, by the key of the object or list that has them.
_KEYS: Mapping[str, Mapping[str, str]] = {
    "": {"run": "session", "lives": "runs"},
    "session": {"lives": "runs"},
    "merged": {"lives": "runs"},
    "cells": {"lives": "runs", "blanks": "not_applicable"},
    "names": {"plain": "unwrapped"},
    "runs": {"verb": "action"},
}
#: The keys of texts with cell ids.
_WITH_IDS = frozenset({"cell", "nodeid", "reproduce", "unreached"})

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
    """Return the document in format 2. Values of a wrong type stay as they are: ``Report.from_json`` reports them."""
    return {**_converted(document, ""), "format": 2}


def _converted(value: Any, key: str) -> Any:
    """Return the value of that key as format 2 has it."""
    if isinstance(value, Mapping):
        current = _KEYS.get(key, {})
        return {(name := current.get(old, old)): _converted(one, name) for old, one in value.items()}
    if isinstance(value, list):
        return [_converted(one, key) for one in value]
    if key in _WITH_IDS and isinstance(value, str):
        return _OPTIONS_OF_CELL.sub(_current_options, value)
    return value


def _current_options(found: re.Match[str]) -> str:
    return "-".join(_OPTIONS.get(token, token) for token in found[0].split("-"))
