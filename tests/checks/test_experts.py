"""Checks on experts that are tensors of their own, each on some ranks, on hand-made traces."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_distcompat.evidence.meshes import mesh
from pytest_distcompat.trace import REPLICATE, STAGE, Layout, MeshDim, together

if TYPE_CHECKING:
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
        dims = MeshDim("dp_replicate", 2, snapshot.rank // 2, REPLICATE), MeshDim("ep", 2, at, STAGE)
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
            ranks, square = together((info.layout.holders, info.square) for info in gradients)
            steps.append(replace(step, gradients=tuple(gradients), square=square, holders=ranks))
        return replace(snapshot, steps=tuple(steps))

    story = replace(story, cell=replace(story.cell, options=(*story.cell.options, ("ep", 2))))
    for run in ("train", "resume"):
        story = story.alter(change, run=run)
    return story


def test_experts_on_two_ranks_each(sound: Sound) -> None:
    story = spread(sound("ddp-fp32-w4"))
    for check in TRAINED:
        assert story.findings(check) == [], check


def test_experts_spread_over_the_ranks_of_tensor_parallelism(sound: Sound) -> None:
    """As transformers has it: ``DistributedConfig(tp_size=2, ep_size=2)`` leaves each expert whole, on one of two peers."""
    story = sound("fsdp2-fp32-w4-tp_2")
    expert = story.live("inlet.weight")

    def over_peers(layout: Layout) -> Layout:
        return replace(
            layout, dims=tuple(replace(dim, name={"tp": "ep"}.get(dim.name, dim.name)) for dim in layout.dims)
        )

    def change(snapshot: Snapshot) -> Snapshot:
        assert snapshot.model
        parameters = tuple(
            replace(info, layout=over_peers(info.layout)) if info.name == expert else info
            for info in snapshot.parameters
        )
        return replace(snapshot, model=replace(snapshot.model, parameters=parameters))

    story = replace(story, cell=replace(story.cell, options=(*story.cell.options, ("ep", 2))))
    for run in ("train", "resume"):
        story = story.alter(lambda snapshot: change(snapshot) if snapshot.model else snapshot, run=run)
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
        dims = (MeshDim("dp_replicate", 4, snapshot.rank, REPLICATE),)
        frozen = story.live("frozen.weight")
        assert snapshot.model
        parameters = tuple(
            replace(info, layout=Layout(dims)) if info.name == frozen else info for info in snapshot.parameters
        )
        return replace(snapshot, model=replace(snapshot.model, parameters=(*parameters[1:], parameters[0])))

    drawn = mesh(story.cell, story.alter(replicate, action="build").trace.run())
    assert drawn
    assert drawn["dims"] == [{"name": "dp_replicate", "size": 2}, {"name": "ep", "size": 2}]
    assert [rank["at"] for rank in drawn["ranks"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    parts = {layout["names"][0]: layout["parts"] for layout in drawn["layouts"]}
    assert parts["inlet.weight"] == ["all", "none", "all", "none"]
    assert parts["frozen.weight"] == ["all"] * 4
