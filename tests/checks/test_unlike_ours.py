"""Checks on traces of trainers whose optimizer, model, batches or files differ from the built-in drivers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.trace import StateInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.checks.traces import Sound, Story

    from pytest_distcompat.trace import OptimizerInfo, Snapshot

REPLICAS_AND_SHARDS = ("ddp-fp32-w2", "fsdp2-fp32-w2")


def with_states(
    story: Story, change: Callable[[OptimizerInfo], tuple[StateInfo, ...]], dtypes: tuple[str, ...]
) -> Story:
    """With other states in all runs and snapshots."""

    def altered(snapshot: Snapshot) -> Snapshot:
        steps = tuple(replace(step, state=dtypes) for step in snapshot.steps)
        optimizer = snapshot.optimizer and replace(snapshot.optimizer, states=change(snapshot.optimizer))
        return replace(snapshot, optimizer=optimizer, steps=steps)

    runs = {name: replace(run, snapshots=tuple(map(altered, run.snapshots))) for name, run in story.trace.runs.items()}
    return replace(story, trace=replace(story.trace, runs=runs))


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
    expected = [
        f"all ranks together keep {8 if cell.startswith('fsdp2') else 16} elements of {key!r}"
        for key in ("exp_avg", "exp_avg_sq")
    ]
    assert [text.partition(";")[0] for text in story.findings("memory")] == expected


@pytest.mark.parametrize("cell", REPLICAS_AND_SHARDS)
def test_a_number_beside_the_moments(sound: Sound, cell: str) -> None:
    """As NAdam keeps one."""

    def more(optimizer: OptimizerInfo) -> tuple[StateInfo, ...]:
        owners = dict.fromkeys(state.owner for state in optimizer.states)
        return (*optimizer.states, *(StateInfo(owner, "mu_product", "float32", 1, "1:1") for owner in owners))

    story = with_states(sound(cell), more, ("float32",))
    assert story.findings("memory") == []


@pytest.mark.parametrize("cell", REPLICAS_AND_SHARDS)
def test_factors_instead_of_moments(sound: Sound, cell: str) -> None:
    """As Adafactor keeps them, of matrices; of vectors it keeps something else."""

    def factored(optimizer: OptimizerInfo) -> tuple[StateInfo, ...]:
        owners = sorted({state.owner for state in optimizer.states})
        if not owners:
            return ()
        matrix = [StateInfo(owners[0], key, "float32", 2, "2:1") for key in ("row_var", "col_var")]
        return (*matrix, *(StateInfo(owner, "variance", "float32", 8, "8:1") for owner in owners[1:]))

    story = with_states(sound(cell), factored, ("float32",))
    assert story.findings("memory") == []


@pytest.mark.parametrize(("products", "silent"), [(0, True), (1, False), (None, False)])
def test_a_model_without_matrix_products(sound: Sound, products: int | None, silent: bool) -> None:
    def altered(snapshot: Snapshot) -> Snapshot:
        return replace(snapshot, unwrapped=snapshot.unwrapped and replace(snapshot.unwrapped, products=products))

    story = sound("ddp-fp32-w2").alter(altered, action="build_model").snapshot("step", {"compute": ()}, nth=2, rank=1)
    assert story.findings("dtypes") == ([] if silent else ["rank 1: matrix products ran in nothing; expected float32"])


def test_a_dtype_that_nobody_knows_is_no_crash(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w2").parameters({"dtype": "uint4"}, only="frozen.weight", action="step", nth=2)
    assert story.findings("dtypes") == []


def test_a_batch_without_a_tensor(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").snapshot("step", {"inputs": ("",)}, nth=1)
    expected = [
        f"rank {rank}: no tensor was found in the inputs of step 2, so ranks cannot be compared" for rank in (0, 1)
    ]
    assert story.findings("data") == expected


def buffers(digests: tuple[str, str]) -> Callable[[Snapshot], Snapshot]:
    """Another digest of the buffer on each rank."""

    def altered(snapshot: Snapshot) -> Snapshot:
        assert snapshot.model is not None
        buffers = tuple(replace(info, digest=digests[snapshot.rank]) for info in snapshot.model.buffers)
        return replace(snapshot, model=replace(snapshot.model, buffers=buffers))

    return altered


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
    story = story.alter(buffers(("zero", "zero")), action="save").alter(
        buffers(("zero", "zero")), run="resume", action="load"
    )
    assert story.findings("resume") == ["rank 1: buffer 'scale': other values after the save"]


@pytest.mark.parametrize("changed", [{"digest": "longer"}, None])
def test_a_buffer_that_no_file_holds_may_be_another(sound: Sound, changed: dict[str, Any] | None) -> None:
    """A rotary table that grew with the texts, or a cache that the first forward made."""

    def loose(snapshot: Snapshot) -> Snapshot:
        unwrapped = snapshot.unwrapped
        return replace(
            snapshot,
            unwrapped=unwrapped
            and replace(unwrapped, buffers=tuple(replace(info, persistent=False) for info in unwrapped.buffers)),
        )

    def altered(snapshot: Snapshot) -> Snapshot:
        assert snapshot.model is not None
        buffers = tuple(replace(info, **changed) for info in snapshot.model.buffers) if changed else ()
        return replace(snapshot, model=replace(snapshot.model, buffers=buffers))

    story = sound("fsdp2-fp32-w2").alter(loose, action="build_model").alter(altered, run="resume", action="load")
    assert story.findings("resume") == []


def test_a_learning_rate_that_begins_anew(sound: Sound) -> None:
    """Set at the end of each step, so that no loss of the first two shows it."""
    story = sound("ddp-fp32-w2").optimizer({"param_groups": ({"lr": 0.5},)}, run="resume", action="step", nth=0, rank=1)
    assert story.findings("resume") == [
        "rank 1: lr of the optimizer's group 0 is 0.5 after step 1 of the resumed run; 0.1 in the run that never stopped"
    ]


def test_a_learning_rate_may_be_rounded(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").optimizer({"param_groups": ({"lr": 0.1 + 1e-16},)}, run="resume", action="step", nth=0)
    assert story.findings("resume") == []


def test_one_narrow_buffer_does_not_excuse_another(sound: Sound) -> None:
    def both(snapshot: Snapshot) -> Snapshot:
        unwrapped = snapshot.unwrapped
        narrow = unwrapped and replace(unwrapped.buffers[0], name="narrow", dtype="bfloat16")
        return replace(snapshot, unwrapped=unwrapped and replace(unwrapped, buffers=(*unwrapped.buffers, narrow)))  # type: ignore[arg-type]

    def rounded(snapshot: Snapshot) -> Snapshot:
        assert snapshot.model is not None
        scale = snapshot.model.buffers[0]
        buffers = (
            replace(scale, dtype="bfloat16"),
            replace(scale, name=f"{scale.name}".replace("scale", "narrow"), dtype="bfloat16"),
        )
        return replace(snapshot, model=replace(snapshot.model, buffers=buffers))

    story = sound("fsdp2-fp32-w2").alter(both, action="build_model").alter(rounded, action="step", nth=2, rank=0)
    assert story.findings("dtypes") == ["rank 0: 1 buffers are in bfloat16, first 'scale'; expected float32"]


def test_an_ordinary_buffer_on_the_meta_device_had_no_values(sound: Sound) -> None:
    def meta(snapshot: Snapshot) -> Snapshot:
        unwrapped = snapshot.unwrapped
        return replace(
            snapshot,
            unwrapped=unwrapped
            and replace(unwrapped, buffers=tuple(replace(buffer, digest="0:0") for buffer in unwrapped.buffers)),
        )

    story = sound("fsdp2-fp32-w2").alter(meta, action="build_model")
    assert story.findings("names") == []
