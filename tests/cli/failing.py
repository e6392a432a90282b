"""One hand-made trace for each check on which it must fail: what the page of the checks shows of their messages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.checks import (
    more_runs,
    sound_runs,
    test_coverage,
    test_damage,
    test_evaluation,
    test_exchanges,
    test_float8,
    test_gradients,
    test_save_only_model,
    test_scaling,
    test_stages,
)
from tests.checks.traces import Story
from tests.unit import test_cost

from pytest_distcompat.cell import Cell
from pytest_distcompat.trace import (
    CollectiveInfo,
    ExtraState,
    ExtraStateInfo,
    FileInfo,
    RowWeight,
    Snapshot,
    TokenWeights,
)


def sound(cell_id: str) -> Story:
    """The story of a cell in which nothing is wrong."""
    cell = Cell.parse(cell_id)
    return Story(cell, sound_runs.trace_of(cell), functools.partial(sound_runs.live_name, cell))


def runs_of(cell_id: str, check: str) -> Story:
    """Return the story with the runs that the check needs."""
    story = sound(cell_id)
    return replace(story, trace=more_runs.trace_of(story.cell, check))


@dataclass(frozen=True)
class Example:
    """``wrong``: what the trainer does, in words that follow "A trainer that"."""

    wrong: str
    cell: str
    story: Callable[[str], Story]


def _means_of_ranks(cell: str) -> Story:
    def declare(snapshot: Snapshot) -> Snapshot:
        assert snapshot.unwrapped is not None
        return replace(snapshot, unwrapped=replace(snapshot.unwrapped, mean="token"))

    story = sound(cell).alter(declare, action="build_model")
    for rank, tokens in enumerate((4, 8)):
        weights = TokenWeights((RowWeight(tokens, 1 / tokens),), known=True)
        for nth in range(3):
            story = story.snapshot("step", {"token_weights": (weights,)}, nth=nth, rank=rank)
    return story


def _average(digest: str) -> dict[str, Any]:
    return {"extra": (ExtraStateInfo("trainer.average", ExtraState(), {}, {"inlet.weight": digest}),)}


def _with_average(story: Story, run: str, action: str) -> Story:
    story = story.snapshot(action, _average("3"), run=run)
    return story.snapshot("step", _average("3"), run=run, nth=2)


def _units(cell: str) -> Story:
    return sound(cell).model({"units": ("",)}, action="step", nth=2)


def _masters_of_the_frozen(cell: str) -> Story:
    return replace(sound(cell), trace=test_cost.trace(test_cost.run(master=150, exp_avg=16)))


def _reduced_twice(cell: str) -> Story:
    twice = (CollectiveInfo("allreduce", "float32", 2, 16, 32),)
    return sound(cell).snapshot("step", {"collectives": twice}, nth=1)


def _export_of_a_wrapped_model(cell: str) -> Story:
    def change(snapshot: Snapshot) -> Snapshot:
        keys = ("module.inlet.weight", "module.outlet.weight", "module.frozen.weight", "module.scale")
        return replace(
            snapshot, files=tuple(replace(f, keys=keys) if "export" in f.path else f for f in snapshot.files)
        )

    return runs_of(cell, "export").alter(change, action="files", rank=0)


def _model_alone(cell: str) -> Story:
    story, weights = test_save_only_model.saved(runs_of, cell)
    weights.pop("outlet.weight")
    return story.snapshot(
        "files", {"saved": (FileInfo("model.safetensors", "", "model", tuple(weights), digests=weights),)}, rank=0
    )


def _overflow_on_one_rank(cell: str) -> Story:
    story = test_scaling.overflowing(sound(cell))
    return story.snapshot("overflow", {"scaler": {"scale": 1024.0}}, run="overflow", rank=0)


def _nothing_converted(cell: str) -> Story:
    return test_float8.converted(sound(cell), 0, 0)


def _loaded_though_corrupted(cell: str) -> Story:
    return test_damage.ending(runs_of(cell, "damage"), "removed", None)


def _all_rows_on_both(cell: str) -> Story:
    alike = {("rows", "in order", 1): test_coverage.epochs("in order", 0)}
    return replace(sound(cell), trace=test_coverage.trace(alike))


def _rows_counted_twice(cell: str) -> Story:
    return replace(sound(cell), trace=test_evaluation.trace({"mean": 10.5}, {"mean": 10.5}, alone={"mean": 11.0}))


def _bool_is_widened(cell: str) -> Story:
    return replace(sound(cell), trace=test_exchanges.trace((test_exchanges.WIDENED,), (test_exchanges.SOUND,)))


def _lost_under_deepspeed(cell: str) -> Story:
    return test_stages.staged(sound, cell).model({"float8": 0}, action="step", nth=2)


def _slow(cell: str) -> Story:
    own = (test_cost.run(seconds=2), test_cost.run("baseline", seconds=0.5))
    return replace(sound(cell), trace=test_cost.trace(*own, limit=0.9))


def _loss_doubled(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, loss=snapshot.loss and 2 * snapshot.loss)


#: Where the optimizer's state is after a load.
LOADED: Mapping[str, Any] = {"run": "resume", "action": "load"}

EXAMPLES: Mapping[str, Example] = {
    "active": Example(
        "configures FSDP2 and gets DDP",
        "fsdp2-fp32-w2",
        lambda cell: sound(cell).model({"wrappers": {"DDP": 1}}, action="build").parameters({"kind": "Parameter"}),
    ),
    "names": Example(
        "compiles the model in a cell without `compile`",
        "fsdp2-fp32-w2",
        lambda cell: sound(cell).renamed("outlet.weight", "_orig_mod.outlet.weight", action="step", nth=2),
    ),
    "optimizer": Example(
        "makes the optimizer before it wraps the model",
        "fsdp2-fp32-w2",
        lambda cell: (
            sound(cell).parameters({"held": 0}, action="build").parameters({"digest": "1:1"}, only="outlet.weight")
        ),
    ),
    "dtypes": Example(
        "loads in bfloat16 and does not upcast",
        "fsdp2-bf16_upcast-w2",
        lambda cell: (
            sound(cell)
            .parameters({"dtype": "bfloat16"}, action="step", nth=2)
            .stepped({"master": ("bfloat16",), "state": ("bfloat16",)}, action="step", nth=2)
        ),
    ),
    "restarts": Example(
        "saves the steps of its own run alone",
        "ddp-fp32-w2",
        lambda cell: runs_of(cell, "restarts").snapshot("step", {"loss": 0.5}, run="third", nth=0),
    ),
    "again": Example(
        "goes on with the spent schedule of its first training",
        "ddp-fp32-w2",
        lambda cell: runs_of(cell, "again").optimizer(
            {"param_groups": ({"lr": 0.003, "weight_decay": 0.01},)}, run="again", action="step", nth=5
        ),
    ),
    "best": Example(
        "keeps the weights of its last step, where it was to go back to its best checkpoint",
        "ddp-fp32-w2",
        lambda cell: runs_of(cell, "best"),
    ),
    "midway": Example(
        "shuffles the rows of an evaluation by the generator of the training",
        "ddp-fp32-w2",
        lambda cell: runs_of(cell, "midway").snapshot("call evaluate()", {"rng": "drawn"}, run="resume"),
    ),
    "mean": Example(
        "averages the means of ranks, and says that each token counts alike",
        "ddp-fp32-w2",
        _means_of_ranks,
    ),
    "extra_state": Example(
        "forgets its average of the weights",
        "ddp-fp32-w2",
        lambda cell: _with_average(sound(cell), "train", "save").snapshot("load", _average("0"), run="resume"),
    ),
    "start": Example(
        "loads the weights on rank 0 and does not send them",
        "ddp-fp32-w2",
        lambda cell: runs_of(cell, "start").parameters({"digest": "3:1"}, only="outlet.weight", action="build", rank=1),
    ),
    "resume": Example(
        "loads the model and not the optimizer",
        "fsdp2-fp32-w2",
        lambda cell: sound(cell).optimizer({"states": ()}, **LOADED),
    ),
    "parity": Example(
        "adds losses up that should be averaged",
        "ddp-fp32-w2",
        lambda cell: sound(cell).alter(_loss_doubled, action="step"),
    ),
    "clipping": Example(
        "clips by the norm of each rank's own shard",
        "fsdp2-fp32-w2",
        lambda cell: sound(cell).stepped({"square": 1.0}, action="step"),
    ),
    "gradients": Example(
        "adds up one gradient that it should average",
        "fsdp2-fp32-w2",
        lambda cell: test_gradients.scaled(sound(cell), {"outlet.weight": 2.0}),
    ),
    "units": Example("wraps the whole model in one unit", "fsdp2-fp32-w2", _units),
    "accumulation": Example("reduces gradients after each micro-batch", "ddp-fp32-w2-grad_accum_2", _reduced_twice),
    "memory": Example("keeps masters of frozen parameters", "fsdp2-fp32-w2", _masters_of_the_frozen),
    "data": Example(
        "shuffles every rank's data alike",
        "ddp-fp32-w2",
        lambda cell: sound(cell).snapshot("step", {"inputs": ("batch 1.0 of rank 0",)}, nth=0),
    ),
    "coverage": Example("gives each rank all rows", "ddp-fp32-w2", _all_rows_on_both),
    "evaluation": Example("counts rows that fill the last batch", "ddp-fp32-w2", _rows_counted_twice),
    "exchanges": Example("pads by an addition, which makes int64 of bool", "ddp-fp32-w2", _bool_is_widened),
    "observers": Example(
        "rounds the live model for the export",
        "ddp-fp32-w2",
        lambda cell: sound(cell).parameters({"digest": "3:1"}, only="outlet.weight", action="exported", rank=0),
    ),
    "randomness": Example(
        "seeds all ranks alike",
        "ddp-fp32-w2-model_dropout",
        sound,
    ),
    "reshard": Example(
        "pads its shards for one number of ranks",
        "fsdp2-fp32-w2",
        lambda cell: runs_of(cell, "reshard").parameters(
            {"digest": "3:1"}, only="outlet.weight", run="up", action="load", rank=3
        ),
    ),
    "portable": Example(
        "exports the weights of the step before",
        "zero3-fp32-w2",
        lambda cell: runs_of(cell, "portable").parameters({"digest": "3:1"}, run="port", action="build", rank=0),
    ),
    "export": Example("exports the wrapped model's own state dict", "ddp-fp32-w2", _export_of_a_wrapped_model),
    "paths": Example(
        "looks for the word `optimizer` in a path",
        "fsdp2-fp32-w2",
        lambda cell: runs_of(cell, "paths").optimizer({"states": ()}, run="reopened", action="load"),
    ),
    "damage": Example("loads what is there and makes the rest anew", "ddp-fp32-w2", _loaded_though_corrupted),
    "save_only_model": Example("does not gather a block", "fsdp2-fp32-w2-save_only_model", _model_alone),
    "scaling": Example("looks for infinities on each rank by itself", "fsdp1-fp16_mixed-w2", _overflow_on_one_rank),
    "float8": Example("converts no layer", "zero2-fp8-w2", _nothing_converted),
    "stages": Example("loses the setting for 8 bits under DeepSpeed", "zero2-fp8-w2", _lost_under_deepspeed),
    "throughput": Example("gathers each layer by itself (`--distcompat-throughput 0.9`)", "fsdp2-fp32-w2", _slow),
}
