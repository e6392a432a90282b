"""Extra state that the reference has too, on hand-made snapshots: what ``parity`` says of its tensors' norms."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_distcompat.checks._extra_norms import other_extra_state
from pytest_distcompat.trace import ExtraState, ExtraStateInfo, Snapshot

EXPECTED = {"state_dict.inlet": 9.0, "state_dict.outlet": 16.0}


def snapshot(rank: int, squares: Mapping[str, float], name: str = "average") -> Snapshot:
    info = ExtraStateInfo(name, ExtraState(in_reference=True), {}, {}, squares)
    return Snapshot(rank, "train", "step", 2, extra=(info,))


def findings(*of_ranks: Mapping[str, float]) -> list[str]:
    snapshots = [snapshot(rank, squares) for rank, squares in enumerate(of_ranks)]
    return list(other_extra_state(snapshots, snapshot(0, EXPECTED), 1e-4))


def test_replicas_count_once_and_shards_add_up() -> None:
    assert findings(EXPECTED, EXPECTED) == []
    shards = ({"state_dict.inlet (0,)": 4.0}, {"state_dict.inlet (1,)": 5.0})
    assert findings(*({**shard, "state_dict.outlet": 16.0} for shard in shards)) == []


def test_another_norm_or_none() -> None:
    other = {**EXPECTED, "state_dict.outlet": 25.0}
    assert findings(other, other) == [
        "average: state_dict.outlet has norm 5; 4 in the reference (2.5e-01 off, 1.0e-04 allowed)"
    ]
    assert findings({"state_dict.outlet": 16.0}) == ["average has no state_dict.inlet; the reference has"]


def test_a_step_without_the_state_is_not_compared() -> None:
    assert list(other_extra_state([Snapshot(0, "train", "step", 2)], snapshot(0, EXPECTED), 1e-4)) == []
    assert list(other_extra_state([snapshot(0, {}, "other")], snapshot(0, EXPECTED), 1e-4)) == []
