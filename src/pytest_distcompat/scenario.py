"""Scenarios: one or more runs, each a list of actions that every rank performs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pytest_distcompat.calls import REFERENCE_CALL
from pytest_distcompat.cell import OPTIONS, Cell
from pytest_distcompat.trace import Loader


@dataclass(frozen=True)
class Run:
    """One process group from start to end, on which every rank performs the ``actions`` in order.

    - ``build_model`` makes the model, unwrapped; ``reload`` makes it from what ``export`` wrote;
    - ``build``, ``step`` (one optimizer step), ``overflow`` (one with infinite gradients on one rank), ``save``, ``load``,
      ``export``: methods of the trainer;
    - ``exported`` (the model again), ``files`` (rank 0 reads what was saved), ``damage`` (rank 0 corrupts the checkpoint),
      ``evaluate`` (on a fixed batch);
    - ``rows``, ``resumed_rows``, ``moved_rows``: the rows that the trainer's loaders give; ``metrics``: of an evaluation;
    - ``reference``: a step of the same training in one process, in float32, unwrapped; ``rounded``: the same under autocast.

    ``first_step`` is the number of the first step. ``after`` names the run whose checkpoint this one finds. ``strategy``,
    ``precision``, ``world_size`` and ``tp`` say where the run's cell differs from the check's; ``only`` which options it keeps
    (None: all), ``follows`` which settings (None: all), and ``ignores`` which of them it does not. ``directory`` is the
    checkpoint's name, ``damage`` what is done to it. ``same_as`` is the name under which other checks know the very same run.
    ``records_calls``: after each action it is recorded what calls of the live trainer are compared by (``CallInfo``).
    """

    name: str
    actions: tuple[str, ...]
    first_step: int = 0
    after: str = ""
    strategy: str = ""
    precision: str = ""
    world_size: int = 0
    tp: int = 0
    only: tuple[str, ...] | None = None
    directory: str = "checkpoint"
    damage: str = ""
    same_as: str = ""
    follows: tuple[str, ...] | None = None
    ignores: tuple[str, ...] = ()
    records_calls: bool = False

    @property
    def is_reference(self) -> bool:
        """Tell whether one process trains on the batches of all ranks of another run."""
        for action in self.actions:
            if action in {"reference", "rounded"} or action.startswith(REFERENCE_CALL):
                return True
        return False

    def cell(self, cell: Cell) -> Cell:
        """Return the cell that the run runs in, for a check in ``cell``."""
        options = dict(cell.options)
        if self.only is not None:
            options = {name: value for name, value in cell.options if name in self.only}
        if self.follows is not None and cell.set:
            options["set"] = "+".join(self._followed(cell.set, self.follows))
        if self.tp:
            options["tp"] = self.tp
        world_size = self.world_size or cell.world_size
        # One rank is on one node.
        nodes = cell.nodes if world_size > 1 else 1
        strategy = self.strategy or cell.strategy
        precision = self.precision or cell.precision
        return Cell(strategy, precision, world_size, tuple(options.items()), nodes)

    def _followed(self, settings: Iterable[str], names: Iterable[str]) -> list[str]:
        """Return the settings of these objects and fields, without those that the run ignores."""
        beginnings: list[str] = []
        for name in names:
            # A setting is ``OBJECT.FIELD=VALUE``, a field of DeepSpeed's JSON ``ds_config.FIELD.FIELD=VALUE``.
            beginnings += [f"{name}.", f"{name}="]
        followed = [setting for setting in settings if setting.startswith(tuple(beginnings))]
        return [setting for setting in followed if setting not in self.ignores]


def without(*options: str) -> tuple[str, ...]:
    """Return all options but these, for ``Run.only``."""
    return tuple(name for name in OPTIONS if name not in options)


@dataclass(frozen=True)
class Scenario:
    """Runs in order. Scenarios that begin with the same runs share them."""

    name: str
    runs: tuple[Run, ...]

    def following(self, *settings: str) -> Scenario:
        """Return the scenario with a reference for each of two settings, which follows all of the cell's but the other."""
        if not settings:
            return self
        first, second = settings[:2]
        runs: list[Run] = []
        for run in self.runs:
            if run == REFERENCE_RUN:
                runs.append(dataclasses.replace(REFERENCE_RUN, ignores=(second,)))
                runs.append(
                    dataclasses.replace(REFERENCE_RUN, name=OTHER_REFERENCE, ignores=(first,))
                )
            else:
                runs.append(run)
        return dataclasses.replace(self, runs=tuple(runs))


#: Options that say on which mesh a cell runs; one rank has none.
MESH = ("dp_replicate", "tp", "sp", "cp", "ep", "pp", "pp_schedule")

#: Steps of a training: enough for two trainings that differ in their optimizer to diverge.
STEPS = 20
#: How many of them come before the save.
SAVED = 3

#: The rows of the data set that loaders are compared on: 2 and 4 ranks with batches of 2 rows leave some over.
ROWS = 23

_BUILD = ("build_model", "build")

#: Three steps, a checkpoint, two more steps. Three, for the moments of Adam to differ from one another; two, because the
#: first loss after a load depends on the parameters only and the second on the optimizer state. Then the remaining steps.
TRAIN_RUN = Run(
    "train",
    (
        *_BUILD,
        *("step",) * SAVED,
        "save",
        *("step",) * 2,
        "files",
        *("step",) * (STEPS - 5),
        "export",
        "exported",
        "evaluate",
        "files",
    ),
)

#: A fresh process group loads what TRAIN_RUN saved and takes the same two steps.
RESUME_RUN = Run("resume", (*_BUILD, "load", "step", "step"), first_step=3, after="train")

#: A resumed run that saves twice in one place, and one that resumes from the second save. The first goes on to the end of
#: an epoch, the second over it.
SECOND_RUN = Run(
    "second",
    (*_BUILD, "load", "step", "save", *("step",) * 2, "save", *("step",) * 2),
    first_step=3,
    after="train",
)
THIRD_RUN = Run("third", (*_BUILD, "load", *("step",) * 4), first_step=6, after="second")

#: The settings that the reference follows, of an object or a field: they change the training, and one process can be given them.
FOLLOWED = (
    "AdamW",
    "SGD",
    "Adafactor",
    "Muon",
    "AdamW8bit",
    "ds_config.optimizer",
    "ds_config.scheduler",
    "ds_config.gradient_clipping",
    "DeepSpeedPlugin.gradient_clipping",
    "TrainingArguments.max_grad_norm",
    "TrainingArguments.learning_rate",
    "TrainingArguments.weight_decay",
    "TrainingArguments.adam_beta1",
    "TrainingArguments.adam_beta2",
    "TrainingArguments.adam_epsilon",
    "TrainingArguments.optim",
    "TrainingArguments.optim_args",
    "TrainingArguments.lr_scheduler_type",
    "TrainingArguments.lr_scheduler_kwargs",
    "TrainingArguments.warmup_steps",
    "TrainingArguments.label_smoothing_factor",
    "TrainingArguments.average_tokens_across_devices",
)

#: The same training without any strategy: the reference for losses, norms and learning rates.
#: It trains on the batches of all ranks of the check's cell.
REFERENCE_RUN = Run(
    "reference",
    ("build_model", *("reference",) * STEPS),
    strategy="ddp",
    world_size=1,
    # With flat parameters a trainer may lose its groups.
    only=(
        "model",
        "grad_accum",
        "frozen",
        "lora",
        "param_groups",
        "use_orig_params",
        "optimizer",
        "set",
    ),
    follows=FOLLOWED,
)

#: The name of the reference that follows the other one of two settings which say different values of the same.
OTHER_REFERENCE = "other_reference"

#: The reference under autocast: how far rounding alone moves a training, for a model that is not built in.
ROUNDED_RUN = dataclasses.replace(
    REFERENCE_RUN, name="rounded", actions=("build_model", *("rounded",) * STEPS)
)

#: Loads the export with the model's own library alone.
RELOAD_RUN = Run(
    "reload",
    ("reload", "evaluate"),
    after="train",
    strategy="ddp",
    world_size=1,
    only=("model", "lora"),
)

#: A run directory whose name has spaces, separators, umlauts and words that trainers search paths for
#: (https://github.com/huggingface/accelerate/pull/4119); REOPENED_RUN loads what is saved there.
NAMED_RUN = Run(
    "named",
    (*_BUILD, "step", "save", "step", "files"),
    directory="a run/of pytorch_model_fsdp and optimizer/größe é",
)
REOPENED_RUN = Run(
    "reopened",
    (*_BUILD, "load", "step"),
    first_step=1,
    after="named",
    directory=NAMED_RUN.directory,
)

#: A file is where the checkpoint's directory should be. It is put there before ``build``, when some trainers look.
BLOCKED_RUN = Run(
    "blocked",
    ("build_model", "damage", "build", "step", "save", "step"),
    directory="blocked here",
    damage="block",
)

#: A checkpoint with a truncated or removed file. It is corrupted before ``build``, after which all ranks are in step: none loads
#: earlier.
TRUNCATED_RUN = Run(
    "truncated",
    ("build_model", "damage", "build", "load", "step"),
    first_step=3,
    after="train",
    damage="truncate",
)
REMOVED_RUN = dataclasses.replace(TRUNCATED_RUN, name="removed", damage="remove")
DAMAGED_RUNS = (TRUNCATED_RUN, REMOVED_RUN)

#: Gradients overflow in the second of three steps, as they do in float16 until a scaler has found its scale.
OVERFLOW_RUN = Run("overflow", (*_BUILD, "step", "overflow", "step"))

#: Loaders give their rows for two epochs, begin in the second, then half as far into it at twice as many ranks.
ROWS_RUN = Run("rows", ("rows", "metrics"))
RESUMED_ROWS_RUN = Run("resumed_rows", ("resumed_rows",), after="rows")
ALONE_RUN = Run("alone", ("metrics",), world_size=1, only=without(*MESH))

TRAIN = Scenario("train", (TRAIN_RUN,))
RESUME = Scenario("resume", (TRAIN_RUN, RESUME_RUN))
RESTARTS = Scenario("restarts", (TRAIN_RUN, SECOND_RUN, THIRD_RUN))
PARITY = Scenario("parity", (TRAIN_RUN, REFERENCE_RUN))
ROUNDED_PARITY = Scenario("parity", (TRAIN_RUN, REFERENCE_RUN, ROUNDED_RUN))
EXPORT = Scenario("export", (TRAIN_RUN, RELOAD_RUN))
PATHS = Scenario("paths", (NAMED_RUN, REOPENED_RUN, BLOCKED_RUN))
#: Of a trainer that knows the directory when it is built.
BLOCKED_AT_BUILD_RUN = dataclasses.replace(BLOCKED_RUN, actions=("build_model", "damage", "build"))
PATHS_AT_BUILD = Scenario("paths", (NAMED_RUN, REOPENED_RUN, BLOCKED_AT_BUILD_RUN))
OVERFLOW = Scenario("overflow", (OVERFLOW_RUN,))
#: 8 bits alone, DeepSpeed alone, then both.
STAGES = Scenario(
    "stages",
    (
        dataclasses.replace(TRAIN_RUN, name="fp8_alone", strategy="fsdp2", same_as=TRAIN_RUN.name),
        dataclasses.replace(
            TRAIN_RUN, name="zero_alone", precision="bf16_upcast", same_as=TRAIN_RUN.name
        ),
        TRAIN_RUN,
    ),
)
EVALUATION = Scenario("evaluation", (ROWS_RUN, ALONE_RUN))
DAMAGE = Scenario("damage", (TRAIN_RUN, *DAMAGED_RUNS))


def reshard(cell: Cell, tp: int = 0) -> Scenario:
    """Return runs that load a checkpoint at twice its world size, then back at its own; and in one process.

    One of tensor or pipeline parallelism is loaded without it at the same world size, and what that saves with it, in parts of
    ``tp`` ranks.
    """
    world_size = cell.world_size
    # One step before the save, so that what is loaded last is not what was loaded first.
    up = Run("up", (*_BUILD, "load", "step", "save", "step"), first_step=3, after="train")
    if cell.tp * cell.pp > 1:
        up = dataclasses.replace(up, only=without(*MESH))
    else:
        up = dataclasses.replace(up, world_size=2 * world_size)
    back = Run(
        "back", (*_BUILD, "load", "step"), first_step=4, after="up", world_size=world_size, tp=tp
    )
    runs = [TRAIN_RUN, up, back]
    if world_size > 1:
        runs.append(
            Run(
                "one",
                (*_BUILD, "load", "step"),
                first_step=3,
                after="train",
                world_size=1,
                only=without(*MESH),
            )
        )
    return Scenario("reshard", tuple(runs))


def coverage(cell: Cell, loaders: Collection[Loader]) -> Scenario:
    """Return runs of loaders from the beginning and, of those that can do it, resumed, and resumed at twice as many ranks.

    On a mesh they are not resumed at twice as many: what is left is shared among more ranks as it is without one.
    """
    runs = [ROWS_RUN]
    if any(loader.resumes for loader in loaders):
        runs.append(RESUMED_ROWS_RUN)
    on_mesh = any(name in MESH for name, _ in cell.options)
    if not on_mesh and any(loader.moves for loader in loaders):
        world_size = 2 * cell.world_size
        runs.append(Run("moved_rows", ("moved_rows",), after="rows", world_size=world_size))
    return Scenario("coverage", tuple(runs))


def port(strategy: str) -> Scenario:
    """Return runs that save under one strategy and load under another, without options that shape flat parameters."""
    options = without("use_orig_params", *MESH)
    moved = Run(
        "port",
        (*_BUILD, "load", "step", "step"),
        first_step=3,
        after="train",
        strategy=strategy,
        only=options,
    )
    return Scenario("portable", (TRAIN_RUN, moved))


def port_weights(strategy: str) -> Scenario:
    """Return runs that export under one strategy and train on under another, with a new optimizer."""
    moved = Run(
        "port",
        ("reload", "build", "step"),
        after="train",
        strategy=strategy,
        only=("model", "lora"),
    )
    return Scenario("portable", (TRAIN_RUN, moved))
