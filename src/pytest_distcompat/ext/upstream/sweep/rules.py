"""Rules for settings, from ``rules.json``: values to try, intended changes, settings to skip."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import subprocess
import sys
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

from pytest_distcompat.decode import decode
from pytest_distcompat.ext.upstream.sweep.fields import Field, Source
from pytest_distcompat.failures import UsageProblem

#: What DeepSpeed's JSON says where another place decides.
_AUTO = "auto"
#: Keys of a rule besides ``fields``, the patterns of full names, and ``reason``. ``older``: of
#: releases before today's. ``axis``: the facet of a cell, with a value, that asks what is excluded.
#: ``places``: other settings that say the same. ``meant``: the values at which the setting is meant
#: to fail the checks in ``without`` and ``changes``; all without this key. ``changes``: checks that
#: must have findings, for without any the setting had no effect. ``rounds_as``: the precision whose
#: tolerances apply.
_KEYS = {
    "values",
    "excluded",
    "without",
    "options",
    "precision",
    "strategies",
    "checks",
    "twice",
    "beside",
    "older",
    "axis",
    "places",
    "meant",
    "changes",
    "rounds_as",
}


@dataclass(frozen=True)
class Setting:
    """A field, and what is done with it.

    Attributes:
        name: The field's full name.
        state: ``swept``, with values from its type; ``hinted``, with values from the rules;
            ``excluded``; or ``unknown``.
        values: The values to try, as text.
        reason: Why it is excluded, or has hints.
        strategies: Where it is tried.
        precision: The precision of its cells.
        options: Options of its cells.
        without: Checks that it is meant to fail.
        checks: Checks with runs of their own that concern it.
        twice: It and another setting that says the same, joined by ``+``: with equal values, with
            different ones, and with DeepSpeed's "auto".
    """

    name: str
    state: str
    values: tuple[str, ...]
    reason: str
    strategies: tuple[str, ...]
    precision: str
    options: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    twice: tuple[str, ...] = ()

    @property
    def cells(self) -> tuple[str, ...]:
        """Return what option ``set`` has in the cells of the sweep."""
        single = [f"{self.name}={value}" for value in self.values]
        return (*single, *self.twice)


@functools.cache
def rules() -> list[dict[str, Any]]:
    """Return the rules.

    A rule may be for several fields, and several rules for one. Later ones add to earlier ones.

    Raises:
        ValueError: If a rule lacks fields or a reason, or has a key that no rule has.
    """
    file = resources.files(__package__) / "rules.json"
    text = file.read_text(encoding="utf-8")
    all_rules: list[dict[str, Any]] = json.loads(text)
    for rule in all_rules:
        unknown_keys = set(rule) - _KEYS - {"fields", "reason"}
        if not rule.get("reason") or not rule.get("fields") or unknown_keys:
            keys = ", ".join(sorted(_KEYS))
            raise ValueError(f"rules.json: {rule}: expected fields, a reason, and any of {keys}")
    return all_rules


def rule_of(name: str) -> dict[str, Any]:
    """Return what the rules say together about a field of that full name."""
    combined: dict[str, Any] = {}
    for rule in rules():
        if not _matches(name, rule["fields"]):
            continue
        excluded_before = combined.get("excluded") and "excluded" not in rule
        excluding_reason = combined.get("reason")
        combined.update(rule)
        if excluded_before:
            # What excludes a field is why it is excluded, whatever later rules say about others
            # like it.
            combined["reason"] = excluding_reason
    return combined


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a full name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def meant_to_fail(setting: str) -> list[str]:
    """Return the checks that a setting is meant to fail.

    There are none for the value that the driver itself gives.
    """
    name, _, value = setting.partition("=")
    rule = rule_of(name)
    if "twice" in rule:
        # The driver gives the first value of ``twice``, and "auto" leaves it to the driver.
        drivers_values = {_AUTO, *rule["twice"][:1]}
        if value in drivers_values:
            return []
    if not _is_meant(rule, value):
        return []
    return list(rule.get("without", ()))


def changes(settings: Iterable[str], check: str) -> str:
    """Return the first of the settings that is meant to change what a check looks at.

    For example ``TrainingArguments.neftune_noise_alpha=1.0`` for ``parity``, since noise on
    embeddings changes every loss. Empty if there is none.
    """
    for setting in settings:
        name, _, value = setting.partition("=")
        rule = rule_of(name)
        if check in rule.get("changes", ()) and _is_meant(rule, value):
            return setting
    return ""


def _is_meant(rule: Mapping[str, Any], value: str) -> bool:
    """Tell whether a value is one of those at which a rule means to fail checks."""
    return value in rule.get("meant", (value,))


def rounds_as(settings: Iterable[str]) -> str:
    """Return the precision whose tolerances apply; empty for that of the cell."""
    for setting in settings:
        precision: str = rule_of(setting.partition("=")[0]).get("rounds_as", "")
        if precision:
            return precision
    return ""


def concerns_checkpoints(setting: str) -> bool:
    """Tell whether a setting is read while a checkpoint is written or loaded.

    Checks of checkpoints are run with such a setting.
    """
    name, _, _ = setting.partition("=")
    return "resume" in rule_of(name).get("checks", ())


def contradiction(settings: Iterable[str]) -> tuple[str, ...]:
    """Return the settings that contradict each other: they say different values of the same.

    The fields of one rule with ``twice`` say the same.
    """
    setting_by_name = {}
    for setting in settings:
        if not setting.endswith(f"={_AUTO}"):
            name, _, _ = setting.partition("=")
            setting_by_name[name] = setting
    for rule in rules():
        if "twice" not in rule:
            continue
        same = []
        values = set()
        for name, setting in setting_by_name.items():
            if _matches(name, rule["fields"]):
                same.append(setting)
                _, _, value = setting.partition("=")
                values.add(value)
        if len(values) > 1:
            return tuple(same)
    return ()


def _twice(field_read: Field, values: Iterable[str], known: Collection[str]) -> tuple[str, ...]:
    """Return the field beside each other setting that says the same.

    With equal values, with different ones, and with "auto" there.

    Args:
        field_read: The field.
        values: Its values to try.
        known: The names of all fields of its driver.
    """
    rule = rule_of(field_read.name)
    texts = rule.get("twice", _two_values(field_read, values))
    if not texts:
        return ()
    first = texts[0]
    prefix = rule.get("beside", "")
    places = (*field_read.places, *rule.get("places", ()))
    cells: list[str] = []
    for place in dict.fromkeys(places):
        if not _is_tried_beside(rule, place, known):
            continue
        pairs = [(first, first), *itertools.permutations(texts)]
        if place.startswith("ds_config."):
            pairs.append((_AUTO, first))
        for other, own in pairs:
            cells.append(f"{prefix}{place}={other}+{field_read.name}={own}")
    return tuple(cells)


def _two_values(field_read: Field, values: Iterable[str]) -> list[str]:
    """Return the first two different values, the default last, without those that say nothing."""
    candidates = dict.fromkeys((*values, field_read.default))
    return [value for value in candidates if value not in {"", "null"}][:2]


def _is_tried_beside(rule: Mapping[str, Any], place: str, known: Collection[str]) -> bool:
    """Tell whether a field is tried together with another setting that says the same.

    Args:
        rule: What the rules say about the field.
        place: The name of the other setting.
        known: The names of all fields of the driver.
    """
    if not place.startswith("ds_config.") and place not in known:
        return False
    other_rule = rule_of(place)
    if "twice" in other_rule:
        return True
    return not (other_rule.get("excluded") or rule.get("excluded"))


def ruled(field_read: Field, known: Collection[str] = ()) -> Setting:
    """Return what is done with a field by the rules.

    Args:
        field_read: The field.
        known: The names of all fields of its driver.
    """
    rule = rule_of(field_read.name)
    values = tuple(rule.get("values", field_read.values))
    allowed = rule.get("strategies", field_read.strategies)
    strategies = [strategy for strategy in field_read.strategies if strategy in allowed]
    state = _state(rule, values)
    return Setting(
        name=field_read.name,
        state=state,
        values=() if state == "excluded" else values,
        reason=rule.get("reason", ""),
        strategies=tuple(strategies),
        precision=rule.get("precision", field_read.precision),
        options=rule.get("options", {}),
        without=tuple(rule.get("without", ())),
        checks=tuple(rule.get("checks", ())),
        twice=_twice(field_read, values, known),
    )


def _state(rule: Mapping[str, Any], values: Sequence[str]) -> str:
    """Return the state of a setting with this rule and these values, as ``Setting`` has it."""
    if rule.get("excluded"):
        return "excluded"
    if "values" in rule:
        return "hinted"
    return "swept" if values else "unknown"


@functools.cache
def read(sources: tuple[Source, ...], shared: Path | None = None) -> tuple[Field, ...]:
    """Return the fields of sources, read in a process of its own.

    Args:
        sources: What has the fields.
        shared: A directory in which processes of one session find what one of them has read.

    Raises:
        UsageProblem: If they cannot be read, with the end of that process's errors.
    """
    data = json.dumps([dataclasses.asdict(source) for source in sources])
    if shared is None:
        text = _read(data)
    else:
        # Imported late: a session without distributed tests needs none.
        from filelock import FileLock

        digest = zlib.crc32(data.encode())
        file = shared / f"settings-{digest:08x}.json"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                file.write_text(_read(data), encoding="utf-8")
            text = file.read_text(encoding="utf-8")
    return tuple(decode(Field, entry) for entry in json.loads(text))


def _read(data: str) -> str:
    """Return the JSON of the fields of these sources, from a process that imports the libraries."""
    process = subprocess.run(
        [sys.executable, "-m", __package__, data], capture_output=True, text=True, check=False
    )
    if process.returncode:
        errors = process.stderr.strip()[-2000:]
        raise UsageProblem(f"the settings of the installed libraries cannot be read: {errors}")
    return process.stdout


def sources_of(driver: Any) -> tuple[Source, ...]:
    """Return the objects of libraries that a driver makes, as its ``sources`` name them.

    Args:
        driver: A subclass of ``Driver``.
    """
    sources: tuple[Source, ...] = getattr(driver, "sources", ())
    return sources


def settings_of(sources: Iterable[Source], shared: Path | None = None) -> list[Setting]:
    """Return the settings of these sources, in the order of the fields, each once.

    Args:
        sources: What has the fields.
        shared: As for ``read``.
    """
    fields: dict[str, Field] = {}
    for field_read in read(tuple(sources), shared):
        same = fields.get(field_read.name, field_read)
        strategies = dict.fromkeys((*same.strategies, *field_read.strategies))
        places = dict.fromkeys((*same.places, *field_read.places))
        fields[field_read.name] = dataclasses.replace(
            same, strategies=tuple(strategies), places=tuple(places)
        )
    return [ruled(field_read, fields) for field_read in fields.values()]
