"""Dataclasses as plain data and back: what ranks write, and what an older or a newer version wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from pytest_distcompat.decode import decode, encode
from pytest_distcompat.status import Status


@dataclass(frozen=True)
class Shard:
    """A part of a tensor."""

    offsets: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class Record:
    """What a rank wrote."""

    rank: int
    loss: float | None = None
    shards: Mapping[str, tuple[Shard, ...]] = field(default_factory=dict)
    status: Status = Status.PASSED


def test_what_is_written_is_read_back() -> None:
    record = Record(3, 0.5, {"weight": (Shard((0, 4)), Shard((), "bfloat16"))})
    data = encode(record) | {"status": "failed"}
    assert decode(Record, json.loads(json.dumps(data))) == Record(3, 0.5, record.shards, Status.FAILED)


def test_a_rank_without_msgspec_reads_what_this_package_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_distcompat.decode._HAS_MSGSPEC", False)
    record = Record(3, 0.5, {"weight": (Shard((0, 4)), Shard((), "bfloat16"))})
    data = json.loads(json.dumps(encode(record) | {"colour": "red"}))
    del data["status"]
    assert decode(Record, data) == record
    with pytest.raises(TypeError, match="rank"):
        decode(Record, {})


def test_a_loss_that_is_no_number_is_read_back() -> None:
    data = json.loads(json.dumps(encode(Record(0, math.nan)) | {"status": "passed"}))
    assert math.isnan(decode(Record, data).loss or 0)


def test_what_a_newer_version_wrote_is_passed_over() -> None:
    assert decode(Record, {"rank": 1, "colour": "red"}) == Record(1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "Record: Object missing required field `rank`"),
        ({"rank": "one"}, r"Record: Expected `int`, got `str` - at `\$.rank`"),
        ([], "Record: Expected `object`, got `array`"),
    ],
)
def test_what_does_not_fit_the_type_is_refused(data: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(Record, data)
