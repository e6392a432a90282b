"""Checks on experts that are tensors of their own, each on some ranks, on hand-made traces."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_distcompat.evidence.meshes import mesh
from pytest_distcompat.trace import REPLICATE, STAGE, Layout, MeshDim, together

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.checks.traces import Sound, Story

    from pytest_distcompat.trace import Snapshot

TRAINED = ("active", "names", "memory", "clipping", "gradients", "optimizer", "dtypes", "parity", "data", "resume")
#: One expert each, of as many elements.
EXPERTS = ("inlet.weight", "outlet.weight")


def spread(story: Story) -> Story:
    """Leave each of two neighbours its expert."""

    def change(snapshot: Snapshot) -> Snapshot:
        at = snapshot.rank % 2
        other_expert = story.live(EXPERTS[1 - at])
        own_expert = story.live(EXPERTS[at])
        holders = (snapshot.rank - at, snapshot.rank - at + 1)
        dims = (
            MeshDim("dp_replicate", 2, snapshot.rank // 2, REPLICATE),
            MeshDim("ep", 2, at, STAGE),
        )
        own_layout = Layout(dims, holders)

        def layout_of(name: str, layout: Layout) -> Layout:
            return own_layout if name == own_expert else layout

        if snapshot.model is not None:
            parameters = []
            for info in snapshot.model.parameters:
                if info.name != other_expert:
                    parameters.append(replace(info, layout=layout_of(info.name, info.layout)))
            model = replace(snapshot.model, parameters=tuple(parameters))
            snapshot = replace(snapshot, model=model)
        if snapshot.optimizer is not None:
            states = []
            for state in snapshot.optimizer.states:
                if state.owner == other_expert:
                    continue
                layout = state.layout
                if state.key != "step":
                    layout = layout_of(state.owner, state.layout)
                states.append(replace(state, layout=layout))
            optimizer = replace(snapshot.optimizer, states=tuple(states))
            snapshot = replace(snapshot, optimizer=optimizer)
        steps = []
        for step in snapshot.steps:
            gradients = []
            for gradient in step.gradients:
                if gradient.name != other_expert:
                    layout = layout_of(gradient.name, gradient.layout)
                    gradients.append(replace(gradient, layout=layout))
            squares = [(info.layout.holders, info.square) for info in gradients]
            ranks, square = together(squares)
            steps.append(replace(step, gradients=tuple(gradients), square=square, holders=ranks))
        return replace(snapshot, steps=tuple(steps))

    story = story.with_option("ep", 2)
    for run in ("train", "resume"):
        story = story.alter(change, run=run)
    return story


def with_layouts(snapshot: Snapshot, name: str, change: Callable[[Layout], Layout]) -> Snapshot:
    """Return the snapshot with another layout of one parameter of the live model."""
    if snapshot.model is None:
        return snapshot
    parameters = []
    for info in snapshot.parameters:
        if info.name == name:
            parameters.append(replace(info, layout=change(info.layout)))
        else:
            parameters.append(info)
    return replace(snapshot, model=replace(snapshot.model, parameters=tuple(parameters)))


def test_experts_on_two_ranks_each(sound: Sound) -> None:
    story = spread(sound("ddp-fp32-w4"))
    for check in TRAINED:
        assert story.findings(check) == [], check


def test_experts_spread_over_the_ranks_of_tensor_parallelism(sound: Sound) -> None:
    """As transformers has it: ``DistributedConfig(tp_size=2, ep_size=2)`` leaves each expert whole, on one of two peers."""
    story = sound("fsdp2-fp32-w4-tp_2")
    expert = story.live("inlet.weight")

    def over_peers(layout: Layout) -> Layout:
        dims = []
        for dim in layout.dims:
            name = "ep" if dim.name == "tp" else dim.name
            dims.append(replace(dim, name=name))
        return replace(layout, dims=tuple(dims))

    def change(snapshot: Snapshot) -> Snapshot:
        return with_layouts(snapshot, expert, over_peers)

    story = story.with_option("ep", 2)
    for run in ("train", "resume"):
        story = story.alter(change, run=run)
    for check in TRAINED:
        assert story.findings(check) == [], check


def test_replicas_of_an_expert_are_compared_and_other_experts_are_not(sound: Sound) -> None:
    story = spread(sound("ddp-fp32-w4"))
    apart = story.parameters({"digest": "1:1"}, only="outlet.weight", action="step", nth=2, rank=3)
    assert apart.findings("active") == [
        "rank 3: 1 parameters differ from rank 1's after three steps, first 'module.outlet.weight'; replicas must stay equal"
    ]


def test_the_page_draws_experts_at_their_own_coordinates(sound: Sound) -> None:
    story = spread(sound("ddp-fp32-w4"))

    def replicate(snapshot: Snapshot) -> Snapshot:
        layout = Layout((MeshDim("dp_replicate", 4, snapshot.rank, REPLICATE),))
        snapshot = with_layouts(snapshot, story.live("frozen.weight"), lambda _: layout)
        assert snapshot.model
        first, *others = snapshot.parameters
        return replace(snapshot, model=replace(snapshot.model, parameters=(*others, first)))

    replicated = story.alter(replicate, action="build")
    drawn = mesh(story.cell, replicated.trace.run())
    assert drawn
    assert drawn["dims"] == [{"name": "dp_replicate", "size": 2}, {"name": "ep", "size": 2}]
    coordinates = [rank["at"] for rank in drawn["ranks"]]
    assert coordinates == [[0, 0], [0, 1], [1, 0], [1, 1]]
    parts = {}
    for layout in drawn["layouts"]:
        first_name, *_ = layout["names"]
        parts[first_name] = layout["parts"]
    assert parts["inlet.weight"] == ["all", "none", "all", "none"]
    assert parts["frozen.weight"] == ["all", "all", "all", "all"]
