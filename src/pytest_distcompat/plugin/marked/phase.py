"""One phase of a test on one rank, as it stands in the rank's log, and how a rank ends by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_distcompat.excerpt import encodable


class SkipElsewhere:
    """The kind of a rank that ended because it skipped and the others did not."""

    KIND = "skip"


class XFailed:
    """The kind of a rank that ended because it failed as its xfail mark says."""

    KIND = "xfail"


@dataclass(frozen=True)
class Phase:
    """One phase of an item on one rank: ``setup``, ``call`` or ``teardown``; or the ``subtest`` of that name within one.

    ``lost``: it failed, and only because another rank is gone.
    """

    when: str
    outcome: str
    message: str = ""
    text: str = ""
    location: tuple[str, int, str] | None = None
    sections: tuple[tuple[str, str], ...] = ()
    properties: tuple[tuple[str, Any], ...] = ()
    subtest: str = ""
    lost: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data. Lone surrogates, which a text may hold, are escaped: one in a report ends a whole run of xdist."""
        # Without ``dataclasses.asdict``, which copies each text by functions that a test may patch.
        data: dict[str, Any] = _encodable(vars(self))
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Phase:
        """What ``to_json`` gave, and may stand among other things."""
        return cls(**fields_of(cls, data))

    @property
    def ending(self) -> tuple[str, str] | None:
        """The kind and the message of a rank that ends by it; None of one that goes on. A skip ends it if others go on.

        A subtest ends nothing: it counts when its phase is over.
        """
        if self.subtest:
            return None
        where = "" if self.when == "call" else f" in {self.when}"
        return {
            "failed": ("failed", f"failed{where}: {self.message}"),
            "xfailed": (XFailed.KIND, f"xfailed: {self.message}"),
            "skipped": (SkipElsewhere.KIND, f"skipped ({self.message}) while other ranks went on"),
        }.get(self.outcome)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {key: _encodable(one) for key, one in value.items()}
    return type(value)(map(_encodable, value)) if isinstance(value, (list, tuple)) else value


def fields_of(kind: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Phase or an Outcome as they were before JSON: with tuples for JSON's lists."""
    known = {field.name: data[field.name] for field in dataclasses.fields(kind) if field.name in data}
    location = tuple(known["location"]) if known.get("location") else None
    pairs = {name: tuple((a, b) for a, b in known[name]) for name in ("sections", "properties")}
    return {**known, "location": location, **pairs}
