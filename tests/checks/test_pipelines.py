"""Checks on models that are cut into stages, on hand-made traces: what they say of a stage, and of what two stages hold."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.trace import STAGE, MeshDim

if TYPE_CHECKING:
    from tests.checks.traces import Sound, Story

    from pytest_distcompat.trace import Snapshot

CELL = "ddp-fp32-w2-pp_2"
FIRST = ("inlet.weight", "frozen.weight")
LAST = ("outlet.weight",)
TRAINED = ("active", "names", "memory", "clipping", "gradients", "optimizer", "dtypes", "parity", "data")


def findings_of_trained(story: Story) -> dict[str, list[str]]:
    """The findings of each check of a training that has any."""
    findings_by_check = {}
    for check in TRAINED:
        findings = story.findings(check)
        if findings:
            findings_by_check[check] = findings
    return findings_by_check


def pipelined(story: Story, *stages: tuple[str, ...]) -> Story:
    """Leave each rank its stage, of the parameters with these names; a tied one goes by its other name on the last."""

    def change(snapshot: Snapshot) -> Snapshot:
        dim = MeshDim("pp", len(stages), snapshot.rank, STAGE)
        new_names = {}
        for name in stages[snapshot.rank]:
            tensor = "inlet.weight" if name == "head.weight" else name
            new_names[story.live(tensor)] = story.live(name)
        if snapshot.model is not None:
            parameters = []
            for info in snapshot.model.parameters:
                if info.name in new_names:
                    layout = replace(info.layout, dims=(dim, *info.layout.dims))
                    parameters.append(replace(info, name=new_names[info.name], layout=layout))
            ranks = tuple(range(len(stages)))
            model = replace(snapshot.model, parameters=tuple(parameters), pp_ranks=ranks)
            snapshot = replace(snapshot, model=model)
        if snapshot.optimizer is not None:
            states = []
            for state in snapshot.optimizer.states:
                if state.owner in new_names:
                    states.append(replace(state, owner=new_names[state.owner]))
            optimizer = replace(snapshot.optimizer, states=tuple(states))
            snapshot = replace(snapshot, optimizer=optimizer)
        steps = []
        for step in snapshot.steps:
            gradients = []
            for gradient in step.gradients:
                if gradient.name in new_names:
                    gradients.append(replace(gradient, name=new_names[gradient.name]))
            square = sum(gradient.square for gradient in gradients)
            steps.append(replace(step, gradients=tuple(gradients), square=square))
        return replace(snapshot, steps=tuple(steps))

    return story.alter(change)


def test_a_model_in_two_stages(sound: Sound) -> None:
    story = pipelined(sound(CELL), FIRST, LAST)
    assert findings_of_trained(story) == {}


def test_what_two_stages_train_together_counts_once(sound: Sound) -> None:
    story = pipelined(sound(CELL), FIRST, ("head.weight", *LAST))
    assert findings_of_trained(story) == {}


def test_a_later_step_without_the_gradients_of_each_parameter_has_no_norm_to_compare(sound: Sound) -> None:
    """What both stages count cannot be taken out of the sum; in the steps before it is."""
    story = pipelined(sound(CELL), FIRST, ("head.weight", *LAST))

    def without(snapshot: Snapshot) -> Snapshot:
        steps = tuple(replace(step, gradients=(), square=2 * step.square) for step in snapshot.steps)
        return replace(snapshot, steps=steps)

    assert story.alter(without, action="step", nth=2).findings("clipping") == []
    untied = pipelined(sound(CELL), FIRST, LAST).alter(without, action="step", nth=2)
    (finding, *_) = untied.findings("clipping")
    assert finding.startswith("step 3: all ranks together: the gradients that the optimizer gets have norm")


def test_the_flat_masters_of_each_stage_have_a_tied_parameter(sound: Sound) -> None:
    story = pipelined(sound("zero1-fp32-w2-pp_2"), FIRST, ("inlet.weight", *LAST))
    held = ({"inlet.weight"}, {"inlet.weight", "outlet.weight"})

    def partitioned(snapshot: Snapshot) -> Snapshot:
        if snapshot.optimizer is None:
            return snapshot
        elements = {}
        for info in snapshot.parameters:
            if info.name.removeprefix("module.") in held[snapshot.rank]:
                elements[info.name] = math.prod(info.shape)
        return replace(snapshot, optimizer=replace(snapshot.optimizer, partitioned=elements))

    story = story.alter(partitioned)
    assert [text for text in story.findings("optimizer") if "expected each one" in text] == []
    held[1].discard("inlet.weight")
    (finding,) = [text for text in story.alter(partitioned).findings("optimizer") if "expected each one" in text]
    assert finding.endswith("'module.inlet.weight' are in the optimizer; expected each one 2 times")


def test_a_frozen_part_of_one_stage_in_evaluation_mode(sound: Sound) -> None:
    story = pipelined(sound(CELL), FIRST, LAST).snapshot("step", {"evaluating": ("outlet",)}, rank=1)
    for finding in story.findings("randomness"):
        assert "mode" not in finding


def test_a_stage_that_has_no_snapshot_of_a_step(sound: Sound) -> None:
    story = pipelined(sound(CELL), FIRST, LAST)
    silent = story.without("step", nth=1, rank=1)
    assert "rank 1: no report after step 2" in silent.findings("randomness")


def test_what_two_stages_train_apart(sound: Sound) -> None:
    story = pipelined(sound(CELL), FIRST, ("head.weight", *LAST))
    apart = story.parameters({"digest": "other"}, only="head.weight", action="step", nth=2, rank=1)
    where = "(stages 0 and 1 have them, and train them apart)"
    assert apart.findings("active") == [
        f"rank 1: 1 parameters differ from rank 0's after three steps, first 'inlet.weight' {where}; replicas must stay equal"
    ]


@pytest.mark.parametrize("stages", [((), (*FIRST, *LAST)), ((*FIRST, *LAST), ())])
def test_a_stage_without_layers(sound: Sound, stages: tuple[tuple[str, ...], ...]) -> None:
    held_by_rank = ["all 3", "all 3"]
    held_by_rank[stages.index(())] = "no"
    story = pipelined(sound(CELL), *stages)
    expected = "expected the layers of some of the stages on each of 2 ranks (pp 2)"
    assert story.findings("active") == [
        f"rank 0: the model has {held_by_rank[0]} parameters; {expected}",
        f"rank 1: the model has {held_by_rank[1]} parameters; {expected}",
    ]


def test_a_parameter_on_no_stage(sound: Sound) -> None:
    story = pipelined(sound(CELL), FIRST[:1], LAST)
    assert story.findings("names") == [
        "ranks 0, 1: parameter 'frozen.weight' of the unwrapped model has no live counterpart on any stage"
    ]


def test_a_stage_without_a_kind_of_state_that_others_keep(sound: Sound) -> None:
    story = pipelined(sound(CELL), FIRST, LAST)

    def without(snapshot: Snapshot) -> Snapshot:
        assert snapshot.optimizer
        states = tuple(state for state in snapshot.optimizer.states if state.key != "exp_avg")
        return replace(snapshot, optimizer=replace(snapshot.optimizer, states=states))

    changed = story.alter(without, action="step", nth=2, rank=1)
    assert changed.findings("memory") == [
        "rank 1 together keep 0 elements of 'exp_avg'; 8 elements are trained, expected 8"
    ]


def test_a_stage_without_products(sound: Sound) -> None:
    story = pipelined(sound(CELL), FIRST, LAST).snapshot("step", {"compute": ()}, nth=2, rank=0)
    assert story.findings("dtypes") == []
    changed = story.snapshot("step", {"compute": ()}, nth=2, rank=1)
    assert changed.findings("dtypes") == [
        "rank 0: matrix products ran in nothing; expected float32",
        "rank 1: matrix products ran in nothing; expected float32",
    ]
