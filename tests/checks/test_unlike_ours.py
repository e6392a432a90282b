"""Checks on traces of trainers whose optimizer, model, batches or files differ from the built-in drivers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.trace import StateInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.checks.traces import Sound, Story

    from pytest_distcompat.trace import OptimizerInfo, ParameterInfo, Snapshot

REPLICAS_AND_SHARDS = ("ddp-fp32-w2", "fsdp2-fp32-w2")


def with_states(
    story: Story, change: Callable[[OptimizerInfo], tuple[StateInfo, ...]], dtypes: tuple[str, ...]
) -> Story:
    """Return the story with other states in all runs and snapshots."""

    def altered(snapshot: Snapshot) -> Snapshot:
        optimizer = snapshot.optimizer
        if optimizer is not None:
            optimizer = replace(optimizer, states=change(optimizer))
        steps = tuple(replace(step, state=dtypes) for step in snapshot.steps)
        return replace(snapshot, optimizer=optimizer, steps=steps)

    for run in story.trace.runs:
        story = story.alter(altered, run=run)
    return story


@pytest.mark.parametrize("cell", REPLICAS_AND_SHARDS)
@pytest.mark.parametrize("check", ["names", "dtypes", "memory", "optimizer", "resume"])
def test_sgd_without_momentum_keeps_nothing(sound: Sound, cell: str, check: str) -> None:
    story = with_states(sound(cell), lambda _: (), ())
    assert story.findings(check) == []


@pytest.mark.parametrize("cell", REPLICAS_AND_SHARDS)
def test_state_that_is_missing_of_one_parameter_only(sound: Sound, cell: str) -> None:
    def without_one(optimizer: OptimizerInfo) -> tuple[StateInfo, ...]:
        return tuple(state for state in optimizer.states if "outlet" not in state.owner)

    story = with_states(sound(cell), without_one, ("float32",))
    assert story.findings("names") == ["the optimizer of no rank keeps state for 'outlet.weight'"]
    first, second = story.findings("memory")
    kept = 8 if cell == "fsdp2-fp32-w2" else 16
    assert first.startswith(f"all ranks together keep {kept} elements of 'exp_avg';")
    assert second.startswith(f"all ranks together keep {kept} elements of 'exp_avg_sq';")


def owners_of(optimizer: OptimizerInfo) -> list[str]:
    """Return the names of the parameters of which the optimizer keeps state."""
    return sorted({state.owner for state in optimizer.states})


@pytest.mark.parametrize("cell", REPLICAS_AND_SHARDS)
def test_a_number_beside_the_moments(sound: Sound, cell: str) -> None:
    """As NAdam keeps one."""

    def more(optimizer: OptimizerInfo) -> tuple[StateInfo, ...]:
        products = [StateInfo(owner, "mu_product", "float32", 1, "1:1") for owner in owners_of(optimizer)]
        return (*optimizer.states, *products)

    story = with_states(sound(cell), more, ("float32",))
    assert story.findings("memory") == []


@pytest.mark.parametrize("cell", REPLICAS_AND_SHARDS)
def test_factors_instead_of_moments(sound: Sound, cell: str) -> None:
    """As Adafactor keeps them, of matrices; of vectors it keeps something else."""

    def factored(optimizer: OptimizerInfo) -> tuple[StateInfo, ...]:
        owners = owners_of(optimizer)
        if not owners:
            return ()
        matrix, *vectors = owners
        rows = StateInfo(matrix, "row_var", "float32", 2, "2:1")
        columns = StateInfo(matrix, "col_var", "float32", 2, "2:1")
        variances = [StateInfo(vector, "variance", "float32", 8, "8:1") for vector in vectors]
        return (rows, columns, *variances)

    story = with_states(sound(cell), factored, ("float32",))
    assert story.findings("memory") == []


@pytest.mark.parametrize(("products", "silent"), [(0, True), (1, False), (None, False)])
def test_a_model_without_matrix_products(sound: Sound, products: int | None, silent: bool) -> None:
    story = sound("ddp-fp32-w2").unwrapped({"products": products}, action="build_model")
    story = story.snapshot("step", {"compute": ()}, nth=2, rank=1)
    findings = story.findings("dtypes")
    if silent:
        assert findings == []
    else:
        assert findings == ["rank 1: matrix products ran in nothing; expected float32"]


def test_a_dtype_that_nobody_knows_is_no_crash(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w2").parameters({"dtype": "uint4"}, only="frozen.weight", action="step", nth=2)
    assert story.findings("dtypes") == []


def test_a_batch_without_a_tensor(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").snapshot("step", {"inputs": ("",)}, nth=1)
    assert story.findings("data") == [
        "rank 0: no tensor was found in the inputs of step 2, so ranks cannot be compared",
        "rank 1: no tensor was found in the inputs of step 2, so ranks cannot be compared",
    ]


def buffers(digests: tuple[str, str]) -> Callable[[Snapshot], Snapshot]:
    """Return a change by which the buffer has another digest on each rank."""

    def altered(snapshot: Snapshot) -> Snapshot:
        assert snapshot.model is not None
        (scale,) = snapshot.model.buffers
        return with_buffers(snapshot, replace(scale, digest=digests[snapshot.rank]))

    return altered


def with_buffers(snapshot: Snapshot, *buffers: ParameterInfo) -> Snapshot:
    """Return the snapshot with other buffers of the live model."""
    assert snapshot.model is not None
    return replace(snapshot, model=replace(snapshot.model, buffers=buffers))


@pytest.mark.parametrize("cell", REPLICAS_AND_SHARDS)
@pytest.mark.parametrize(
    ("loaded", "findings"),
    [
        (("zero", "zero"), []),
        (("one", "one"), []),
        (("zero", "one"), []),
        (("zero", "fresh"), ["rank 1: buffer 'scale': other values after the load"]),
    ],
)
def test_statistics_that_each_rank_has_its_own_of(
    sound: Sound, cell: str, loaded: tuple[str, str], findings: list[str]
) -> None:
    """As BatchNorm has: of several ranks one saves."""
    story = sound(cell)
    for action, nth in (("step", 2), ("save", 0)):
        story = story.alter(buffers(("zero", "one")), action=action, nth=nth)
    changed = story.alter(buffers(loaded), run="resume", action="load")
    assert changed.findings("resume") == findings


def test_a_save_that_changes_statistics(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").alter(buffers(("zero", "one")), action="step", nth=2)
    story = story.alter(buffers(("zero", "zero")), action="save")
    story = story.alter(buffers(("zero", "zero")), run="resume", action="load")
    assert story.findings("resume") == ["rank 1: buffer 'scale': other values after the save"]


@pytest.mark.parametrize("changed", [{"digest": "longer"}, None])
def test_a_buffer_that_no_file_holds_may_be_another(sound: Sound, changed: dict[str, Any] | None) -> None:
    """A rotary table that grew with the texts, or a cache that the first forward made."""

    def without_buffers(snapshot: Snapshot) -> Snapshot:
        return with_buffers(snapshot)

    story = unwrapped_buffers(sound("fsdp2-fp32-w2"), {"persistent": False})
    if changed is None:
        story = story.alter(without_buffers, run="resume", action="load")
    else:
        story = story.buffers(changed, run="resume", action="load")
    assert story.findings("resume") == []


def unwrapped_buffers(story: Story, changes: dict[str, Any]) -> Story:
    """Return the story with other fields of each buffer of the unwrapped model."""

    def altered(snapshot: Snapshot) -> Snapshot:
        assert snapshot.unwrapped is not None
        buffers = tuple(replace(info, **changes) for info in snapshot.unwrapped.buffers)
        return replace(snapshot, unwrapped=replace(snapshot.unwrapped, buffers=buffers))

    return story.alter(altered, action="build_model")


def test_a_learning_rate_that_begins_anew(sound: Sound) -> None:
    """Set at the end of each step, so that no loss of the first two shows it."""
    groups = ({"lr": 0.5},)
    story = sound("ddp-fp32-w2").optimizer({"param_groups": groups}, run="resume", action="step", nth=0, rank=1)
    assert story.findings("resume") == [
        "rank 1: lr of the optimizer's group 0 is 0.5 after step 1 of the resumed run; 0.1 in the run that never stopped"
    ]


def test_a_learning_rate_may_be_rounded(sound: Sound) -> None:
    groups = ({"lr": 0.1 + 1e-16},)
    story = sound("ddp-fp32-w2").optimizer({"param_groups": groups}, run="resume", action="step", nth=0)
    assert story.findings("resume") == []


def test_one_narrow_buffer_does_not_excuse_another(sound: Sound) -> None:
    def both(snapshot: Snapshot) -> Snapshot:
        assert snapshot.unwrapped is not None
        (scale,) = snapshot.unwrapped.buffers
        narrow = replace(scale, name="narrow", dtype="bfloat16")
        return replace(snapshot, unwrapped=replace(snapshot.unwrapped, buffers=(scale, narrow)))

    def rounded(snapshot: Snapshot) -> Snapshot:
        assert snapshot.model is not None
        (scale,) = snapshot.model.buffers
        rounded_scale = replace(scale, dtype="bfloat16")
        narrow = replace(rounded_scale, name=scale.name.replace("scale", "narrow"))
        return with_buffers(snapshot, rounded_scale, narrow)

    story = sound("fsdp2-fp32-w2").alter(both, action="build_model")
    story = story.alter(rounded, action="step", nth=2, rank=0)
    assert story.findings("dtypes") == ["rank 0: 1 buffers are in bfloat16, first 'scale'; expected float32"]


def test_an_ordinary_buffer_on_the_meta_device_had_no_values(sound: Sound) -> None:
    story = unwrapped_buffers(sound("fsdp2-fp32-w2"), {"digest": "0:0"})
    assert story.findings("names") == []
