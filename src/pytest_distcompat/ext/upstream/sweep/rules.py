"""Rules for settings, from ``rules.json``: values to try, intended changes, settings to skip.

A setting is a field of an object that a driver, the class by which a trainer is tested, configures
its libraries with: ``ds_config.gradient_clipping``. The sweep tries each setting at a few values,
in cells (configurations under test) such as ``zero2-fp32-w2-set_ds_config.gradient_clipping=0.5``.

``settings_of(sources_of(driver))`` is what the profile ``sweep`` and ``distcompat settings`` call.
It reads which fields there are in the installed release (``read``, in a process of its own) and
applies the rules to each (``ruled``). A field becomes a ``Setting``: with values from its type,
with values from a rule, or left out with a reason. A ``Field`` has its full name, its default and
other values as text (``"true"``), the strategies and the precision under which it matters, and
``places``, the names of other settings that say the same: of an argument of accelerate, say, the
keys of DeepSpeed's JSON that it changes.

The law of cells with settings (``law.py``) asks what the rules say of a setting: which checks it is
meant to fail (``meant_to_fail``), whether it concerns checkpoints, which precision's tolerances
apply, and which settings contradict each other.

A rule is a JSON object: ``{"fields": ["*.gradient_clipping"], "twice": ["1.0", "0.5"], "reason":
"..."}``. ``_KEYS`` explains the keys.
"""

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

#: The value of a key of DeepSpeed's JSON where another place decides, as TrainingArguments.
_AUTO = "auto"
#: Keys of a rule besides ``fields``, the patterns of full names, and ``reason``.
_KEYS = {
    # The values to try, in place of those of the type.
    "values",
    # True: the setting is not tried.
    "excluded",
    # The checks that the setting is meant to fail, since it changes the training on purpose.
    "without",
    # Options of the setting's cells: {"model": "llama"}.
    "options",
    # The precision of its cells.
    "precision",
    # The strategies under which it is tried.
    "strategies",
    # Checks that concern it, beside those that the sweep runs for every setting.
    "checks",
    # Two values at which it is tried beside another setting that says the same, to see which wins.
    "twice",
    # Further settings of such a cell, a text in front of the two.
    "beside",
    # The field is one of releases before today's. A test wants all others to exist.
    "older",
    # What asks for the same in place of an excluded setting: a facet of a cell, "cpu_offload=True".
    # A test wants the facet to exist.
    "axis",
    # The full names of other settings that say the same, beside those of ``Field.places``.
    "places",
    # The values at which the setting is meant to fail the checks in "without" and "changes"; all
    # without this key.
    "meant",
    # Checks that must have findings, for without any the setting had no effect.
    "changes",
    # The precision whose tolerances apply.
    "rounds_as",
    # Checks by which the rounding must show: by the tolerances of the cell's own precision they
    # have findings.
    "shows_in",
}


@dataclass(frozen=True)
class Setting:
    """A field, and what is done with it.

    Attributes:
        name: The field's full name: ``ds_config.gradient_clipping``.
        state: ``swept``, with values from its type; ``hinted``, with values from the rules;
            ``excluded``; or ``unknown``, which has neither values nor a rule.
        values: The values to try, as text: ``("true",)``.
        reason: Why it is excluded, or has hints; empty without a rule.
        strategies: The strategies under which it is tried.
        precision: The precision of its cells.
        options: Options of its cells: ``{"model": "llama"}``.
        without: Checks that it is meant to fail.
        checks: Checks with runs of their own that concern it.
        twice: It and another setting that says the same, joined by ``+``: with equal values, with
            different ones, and with DeepSpeed's "auto". For example
            ``ds_config.gradient_clipping=1.0+TrainingArguments.max_grad_norm=0.5``.
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
        """Return what option ``set`` has in each cell of this setting: ``AdamW.amsgrad=true``."""
        single = [f"{self.name}={value}" for value in self.values]
        return (*single, *self.twice)


@functools.cache
def rules() -> list[dict[str, Any]]:
    """Return the rules of ``rules.json`` in their order.

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
    """Return what the rules say together about a field of that full name, as one rule.

    Of several rules that match, a later one overrides an earlier one, key by key. Empty if none
    matches.
    """
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
    """Return the checks that a setting is meant to fail: ``["parity"]``.

    There are none for the value that the driver itself gives.

    Args:
        setting: With its value: ``ds_config.gradient_clipping=0.5``.
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
    """Return the precision whose tolerances apply with these settings; empty for the cell's own.

    ``ds_config.torch_autocast.enabled=true``, for example, has products of a cell in fp32 computed
    in fewer bits.
    """
    for setting in settings:
        precision: str = rule_of(setting.partition("=")[0]).get("rounds_as", "")
        if precision:
            return precision
    return ""


def shows_rounding(settings: Iterable[str], check: str) -> str:
    """Return the first of the settings whose rounding must show in a check; empty if none must."""
    for setting in settings:
        name, _, value = setting.partition("=")
        if value != "false" and check in rule_of(name).get("shows_in", ()):
            return setting
    return ""


def concerns_checkpoints(setting: str) -> bool:
    """Tell whether a setting is read while a checkpoint is written or loaded.

    Checks of checkpoints are run with such a setting.
    """
    name, _, _ = setting.partition("=")
    return "resume" in rule_of(name).get("checks", ())


def contradiction(settings: Iterable[str]) -> tuple[str, ...]:
    """Return the settings that contradict each other: they say different values of the same.

    The fields of one rule with ``twice`` say the same. Empty if no two contradict each other.
    """
    # Without those at "auto", which leave the value to the other place.
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
    """Return the field beside each other setting that says the same, as ``Setting.twice`` has it.

    With equal values, with different ones, and, where the other one is a key of DeepSpeed's JSON,
    with "auto" there.

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
        # Equal values, then different ones in both orders.
        pairs = [(first, first), *itertools.permutations(texts)]
        if place.startswith("ds_config."):
            pairs.append((_AUTO, first))
        for other, own in pairs:
            cells.append(f"{prefix}{place}={other}+{field_read.name}={own}")
    return tuple(cells)


def _two_values(field_read: Field, values: Iterable[str]) -> list[str]:
    """Return two different values of a field, or fewer if it has fewer.

    The default is one of them only if there are not two other values. Empty and null say nothing.
    """
    candidates = dict.fromkeys((*values, field_read.default))
    return [value for value in candidates if value not in {"", "null"}][:2]


def _is_tried_beside(rule: Mapping[str, Any], place: str, known: Collection[str]) -> bool:
    """Tell whether a field is tried together with another setting that says the same.

    Args:
        rule: What the rules say about the field.
        place: The name of the other setting.
        known: The names of all fields of the driver.
    """
    # The driver does not make the object of the other setting. DeepSpeed's JSON it does make,
    # though not all of its keys are fields.
    if not place.startswith("ds_config.") and place not in known:
        return False
    other_rule = rule_of(place)
    # Such a rule says that the setting is to be tried in this way.
    if "twice" in other_rule:
        return True
    return not (other_rule.get("excluded") or rule.get("excluded"))


def ruled(field_read: Field, known: Collection[str] = ()) -> Setting:
    """Return what is done with a field by the rules, as a ``Setting``.

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

    It takes seconds, since that process imports the libraries. So the workers of xdist share what
    one of them has read, in a file.

    Args:
        sources: What has the fields.
        shared: A directory that the processes of one session share; None to share nothing.

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

    Empty for a driver without that attribute, as most drivers of users are.

    Args:
        driver: A subclass of ``Driver``.
    """
    sources: tuple[Source, ...] = getattr(driver, "sources", ())
    return sources


def settings_of(sources: Iterable[Source], shared: Path | None = None) -> list[Setting]:
    """Return the settings of these sources, in the order of the fields, each once.

    Args:
        sources: What has the fields. Two of one name, for several strategies, are merged.
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
