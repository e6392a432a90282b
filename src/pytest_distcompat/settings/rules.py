"""Rules for settings, from ``rules.json``: values to try, intended changes, and settings to skip."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import subprocess
import sys
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

from filelock import FileLock

from pytest_distcompat.decode import decode
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.settings.fields import Field, Source

#: What DeepSpeed's JSON says where another place decides.
_AUTO = "auto"
#: Keys of a rule besides ``fields``, the patterns of full names, and ``reason``; ``older``: of releases before today's.
_KEYS = {"values", "excluded", "without", "options", "precision", "strategies", "checks", "twice", "beside", "older"}


@dataclass(frozen=True)
class Setting:
    """A field, and what is done with it.

    Attributes:
        name: The field's full name.
        state: ``swept``, with values from its type; ``hinted``, with values from the rules; ``excluded``; or ``unknown``.
        values: The values to try, as text.
        reason: Why it is excluded, or has hints.
        strategies: Where it is tried.
        precision: The precision of its cells.
        options: Options of its cells.
        without: Checks that it is meant to fail.
        checks: Checks with runs of their own that concern it.
        twice: It and another setting that says the same, joined by ``+``: with equal values, with different ones, and with
            DeepSpeed's "auto".
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
        return (*(f"{self.name}={value}" for value in self.values), *self.twice)


@functools.cache
def rules() -> list[dict[str, Any]]:
    """Return the rules. A rule may be for several fields, and several rules for one; the later ones add to the earlier."""
    found: list[dict[str, Any]] = json.loads((resources.files(__package__) / "rules.json").read_text(encoding="utf-8"))
    for rule in found:
        if not rule.get("reason") or not rule.get("fields") or set(rule) - _KEYS - {"fields", "reason"}:
            raise ValueError(f"rules.json: {rule}: expected fields, a reason, and any of {', '.join(sorted(_KEYS))}")
    return found


def rule_of(name: str) -> dict[str, Any]:
    """Return what the rules say together about a field of that full name."""
    rule: dict[str, Any] = {}
    for one in rules():
        if any(fnmatchcase(name, pattern) for pattern in one["fields"]):
            # What excludes a field is why it is excluded, whatever later rules say about others like it.
            reason = {"reason": rule["reason"]} if rule.get("excluded") and "excluded" not in one else {}
            rule = {**rule, **one, **reason}
    return rule


def meant_to_fail(setting: str) -> list[str]:
    """Return the checks that a setting is meant to fail; none for the value that the driver itself gives."""
    name, _, value = setting.partition("=")
    rule = rule_of(name)
    own = value in {_AUTO, *rule.get("twice", ())[:1]} and "twice" in rule
    return [] if own else list(rule.get("without", ()))


def contradiction(settings: Iterable[str]) -> tuple[str, ...]:
    """Return the settings that say different values of the same; the fields of one rule with ``twice`` say the same."""
    said = {one.partition("=")[0]: one for one in settings if not one.endswith(f"={_AUTO}")}
    for patterns in (rule["fields"] for rule in rules() if "twice" in rule):
        found = [one for name, one in said.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if len({one.partition("=")[2] for one in found}) > 1:
            return tuple(found)
    return ()


def _twice(found: Field, values: Iterable[str], known: Collection[str]) -> tuple[str, ...]:
    """Return the field beside each other setting that says the same: with equal values, different ones and "auto"."""
    rule = rule_of(found.name)
    plain = [one for one in dict.fromkeys((*values, found.default)) if one not in {"", "null"}]
    texts = rule.get("twice", plain[:2])
    cells: list[str] = []
    for place in found.places if texts else ():
        other, in_json = rule_of(place), place.startswith("ds_config.")
        if (in_json or place in known) and ("twice" in other or not (other.get("excluded") or rule.get("excluded"))):
            pairs = [(texts[0], texts[0]), *itertools.permutations(texts), *([(_AUTO, texts[0])] if in_json else [])]
            cells += [f"{rule.get('beside', '')}{place}={theirs}+{found.name}={mine}" for theirs, mine in pairs]
    return tuple(cells)


def ruled(found: Field, known: Collection[str] = ()) -> Setting:
    """Return what the rules say about a field; ``known`` are the names of all fields of its driver."""
    rule = rule_of(found.name)
    values = tuple(rule.get("values", found.values))
    state = "excluded" if rule.get("excluded") else "hinted" if "values" in rule else "swept" if values else "unknown"
    strategies = tuple(one for one in found.strategies if one in rule.get("strategies", found.strategies))
    without, checks = tuple(rule.get("without", ())), tuple(rule.get("checks", ()))
    where = strategies, rule.get("precision", found.precision), rule.get("options", {})
    tried = () if state == "excluded" else values
    twice = _twice(found, values, known)
    return Setting(found.name, state, tried, rule.get("reason", ""), *where, without, checks, twice)


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
        place = shared / f"settings-{zlib.crc32(data.encode()):08x}.json"
        with FileLock(f"{place}.lock"):
            if not place.exists():
                place.write_text(_read(data), encoding="utf-8")
            text = place.read_text(encoding="utf-8")
    return tuple(decode(Field, one) for one in json.loads(text))


def _read(data: str) -> str:
    done = subprocess.run([sys.executable, "-m", __package__, data], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageProblem(f"the settings of the installed libraries cannot be read: {done.stderr.strip()[-2000:]}")
    return done.stdout


def settings_of(sources: Iterable[Source], shared: Path | None = None) -> list[Setting]:
    """Return the settings of these sources, in the order of the fields, each once; ``shared`` as for ``read``."""
    fields: dict[str, Field] = {}
    for found in read(tuple(sources), shared):
        was = fields.get(found.name, found)
        strategies = tuple(dict.fromkeys((*was.strategies, *found.strategies)))
        places = tuple(dict.fromkeys((*was.places, *found.places)))
        fields[found.name] = dataclasses.replace(was, strategies=strategies, places=places)
    return [ruled(found, fields) for found in fields.values()]
