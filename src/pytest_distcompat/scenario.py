"""Scenarios: the runs that a check needs, each a list of actions that every rank performs.

A *run* is one process group from start to end. Each check (a claim about a cell) names a
``Scenario``. ``runner.Runner`` runs it for a *cell*, one point of the test matrix such as
``fsdp2-bf16_upcast-w2``; ``worker`` performs the actions on each rank. After each action a rank
records a snapshot, which the check reads under the run's name: ``trace.run("train").at("save")``.

For example the scenario ``RESUME`` has two runs. ``train`` takes three steps, saves, and goes on.
``resume`` is a new process group that loads the checkpoint and repeats the next two steps.

Checks that name the same run share it: it runs only once for a cell. A run may also be in another
cell than that of the check: the reference of ``fsdp2-bf16_upcast-w2`` is a run of one rank.

The file has three parts: the classes ``Run`` and ``Scenario``; all runs and scenarios that do not
depend on the cell; functions that make scenarios for a cell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pytest_distcompat.calls import CALL, REFERENCE_CALL
from pytest_distcompat.cell import OPTIONS, Cell
from pytest_distcompat.trace import Loader


@dataclass(frozen=True)
class Run:
    """One process group from start to end, in which every rank performs the ``actions`` in order.

    The actions, after each of which the probe records a snapshot:

    - ``build_model`` makes the model, which nothing wraps yet; ``reload`` makes it from what
      ``export`` wrote.
    - ``build``, ``step``, ``save``, ``load`` and ``export`` call the trainer; ``step`` is one
      optimizer step. ``overflow`` is a step in which the gradients of one rank are infinite.
    - ``exported`` reads the model that was exported, ``files`` reads on rank 0 what was saved, and
      ``damage`` corrupts the checkpoint on rank 0. ``evaluate`` computes outputs of a fixed batch.
    - ``rows`` reads two epochs of the trainer's data loaders, ``resumed_rows`` and ``moved_rows``
      read loaders that resume, the latter at another world size. ``metrics`` runs an evaluation.
    - ``exchanges`` calls the functions by which ranks exchange values.
    - ``again`` begins a second training in the same trainer, with the first batch.
    - ``reference`` is a step of the same training in one process, in float32 and without wrappers;
      ``rounded`` is the same step under autocast, and ``reference_again`` begins a second training.
    - ``call step(clip='no')`` calls a method that the driver offers beside these (``calls``);
      ``reference step(clip='no')`` makes the same call in one process.
    """

    #: The name of the run in the trace: ``train``.
    name: str
    #: The actions: ``("build_model", "build", "step")``.
    actions: tuple[str, ...]
    #: The number of the first ``step``, by which the trainer gets its batch. More than 0 after a
    #: load, as those steps were taken before the save.
    first_step: int = 0
    #: The name of the run of the same scenario whose checkpoint or export this one loads; empty for
    #: none.
    after: str = ""

    # How the run's cell differs from the cell of the check.

    #: The strategy, precision, number of ranks, and number of tensor-parallel ranks. Empty or 0:
    #: that of the check's cell.
    strategy: str = ""
    precision: str = ""
    world_size: int = 0
    tp: int = 0
    #: The options of the check's cell that the run keeps; None for all.
    only: tuple[str, ...] | None = None
    #: The settings of the check's cell that the run keeps; None for all. A setting is a field of a
    #: library's object, ``AdamW.eps=0.5``. It is named by the object (``AdamW``) or by object and
    #: field (``TrainingArguments.optim``).
    follows: tuple[str, ...] | None = None
    #: Settings that the run drops although ``follows`` keeps them, as ``OBJECT.FIELD=VALUE``.
    ignores: tuple[str, ...] = ()

    #: The name of the checkpoint's directory.
    directory: str = "checkpoint"
    #: How ``damage`` corrupts the checkpoint, see ``corrupt.corrupt``.
    damage: str = ""
    #: The name of a run of other scenarios that does exactly the same, so that it need not run
    #: again; empty for none.
    same_as: str = ""
    #: Whether it loads the first of several checkpoints that were saved in one directory. By
    #: default it loads the last.
    loads_first: bool = False
    #: Whether each snapshot also has ``trace.CallInfo``, such as digests of the gradients. The
    #: extension ``walk`` compares it after each action ``call ...`` and ``reference ...``.
    records_calls: bool = False

    @property
    def is_reference(self) -> bool:
        """Tell whether one process trains on the batches of all ranks of another run."""
        for action in self.actions:
            if action in {"reference", "rounded"} or action.startswith(REFERENCE_CALL):
                return True
        return False

    def cell(self, cell: Cell) -> Cell:
        """Return the cell in which the run trains, given the cell of the check.

        The reference of ``fsdp2-bf16_upcast-w4-compile`` trains in ``ddp-bf16_upcast-w1``, for
        example.
        """
        options = dict(cell.options)
        if self.only is not None:
            options = {name: value for name, value in cell.options if name in self.only}
        if self.follows is not None and cell.set:
            options["set"] = "+".join(self._followed(cell.set, self.follows))
        if self.tp:
            options["tp"] = self.tp
        world_size = self.world_size or cell.world_size
        strategy = self.strategy or cell.strategy
        precision = self.precision or cell.precision
        run_cell = Cell(strategy, precision, world_size, tuple(options.items()))
        if world_size == 1:
            # One rank is on one machine.
            return run_cell
        # Other runs are spread over as many machines as the check's cell is.
        return run_cell.spread_as(cell)

    @property
    def change_of_cell(self) -> Run:
        """Return a run with nothing but what ``cell`` reads: it is equal for runs in equal cells.

        Thousands of runs have few such changes.
        """
        return Run(
            "",
            (),
            strategy=self.strategy,
            precision=self.precision,
            world_size=self.world_size,
            tp=self.tp,
            only=self.only,
            follows=self.follows,
            ignores=self.ignores,
        )

    def _followed(self, settings: Iterable[str], names: Iterable[str]) -> list[str]:
        """Return those of the settings that the run keeps: of these names, and not ignored.

        A setting is ``OBJECT.FIELD=VALUE``. A field of DeepSpeed's JSON is
        ``ds_config.FIELD.FIELD=VALUE``.
        """
        prefixes: list[str] = []
        for name in names:
            prefixes += [f"{name}.", f"{name}="]
        followed: list[str] = []
        for setting in settings:
            if setting.startswith(tuple(prefixes)) and setting not in self.ignores:
                followed.append(setting)
        return followed


def without(*options: str) -> tuple[str, ...]:
    """Return the names of all options of a cell but these, for ``Run.only``."""
    return tuple(name for name in OPTIONS if name not in options)


@dataclass(frozen=True)
class Scenario:
    """The runs that a check needs, in order. Scenarios that begin with the same runs share them.

    Attributes:
        name: Its name.
        runs: The runs. A run that loads a checkpoint comes after the run that saves it.
    """

    name: str
    runs: tuple[Run, ...]


#: Options that say on which mesh a cell runs: how its ranks are arranged in a grid, with dimensions
#: for tensor (``tp``), context (``cp``), expert (``ep``) and pipeline (``pp``) parallelism. A run
#: of one rank has none of them.
MESH = ("dp_replicate", "tp", "sp", "cp", "ep", "pp", "pp_schedule")

#: The number of steps of a training. Two trainings that differ in their optimizer diverge in them.
STEPS = 20
#: How many of the steps come before the checkpoint.
SAVED = 3

#: The rows of the data set for loaders: a number that 2 and 4 ranks with batches of 2 rows do not
#: divide.
ROWS = 23

#: The first actions of each run that trains.
_BUILD = ("build_model", "build")

#: Three steps, a checkpoint, two more steps, then the remaining ones. Three steps before the
#: checkpoint let Adam's moments differ from one another. ``RESUME_RUN`` repeats the two steps after
#: it: the first loss depends on the loaded parameters only, the second one on the loaded optimizer
#: state.
TRAIN_RUN = Run(
    "train",
    (
        *_BUILD,
        *("step",) * SAVED,
        "save",
        *("step",) * 2,
        # Lists the checkpoint alone; the last ``files`` lists the export too.
        "files",
        *("step",) * (STEPS - 5),
        "export",
        "exported",
        "evaluate",
        "files",
    ),
)

#: A new process group loads the checkpoint of TRAIN_RUN and repeats the two steps after it.
RESUME_RUN = Run("resume", (*_BUILD, "load", "step", "step"), first_step=3, after="train")

#: The action ``call evaluate()``, which evaluates between two steps.
EVALUATE = f"{CALL}evaluate()"
#: RESUME_RUN, which then evaluates and takes a further step.
EVALUATED_RUN = dataclasses.replace(RESUME_RUN, actions=(*RESUME_RUN.actions, EVALUATE, "step"))

#: A resumed run that saves twice in one directory, and a run that resumes from the second save. The
#: first run goes on to the end of an epoch, the second run beyond it.
SECOND_RUN = Run(
    "second",
    (*_BUILD, "load", "step", "save", *("step",) * 2, "save", *("step",) * 2),
    first_step=3,
    after="train",
)
THIRD_RUN = Run("third", (*_BUILD, "load", *("step",) * 4), first_step=6, after="second")
#: A run that resumes from the first save of the second run, after the second save was written.
FIRST_SAVE_RUN = Run(
    "first_save",
    (*_BUILD, "load", "step", "step"),
    first_step=4,
    after="second",
    loads_first=True,
)

#: The settings that change the sizes of tensors of the model, which another model must have, too.
SIZES = ("resize_token_embeddings", "from_pretrained.ignore_mismatched_sizes")
#: The settings of an adapter: of LoRA, or of another method of PEFT.
ADAPTER = ("LoraConfig", "PeftConfig")
#: The settings that the reference keeps, see ``Run.follows``. They change the training, and apply
#: to a training in one process, too.
FOLLOWED = (
    "clip_grad_norm_",
    *SIZES,
    "AdamW",
    "SGD",
    "Adafactor",
    "Muon",
    "AdamW8bit",
    *ADAPTER,
    "ds_config.optimizer",
    "ds_config.scheduler",
    "ds_config.gradient_clipping",
    "ds_config.gradient_allreduce_op",
    "Accelerator.step_scheduler_with_optimizer",
    "TrainingArguments.warmup_ratio",
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

#: The reference: the same training in one process, without any wrapper, on the batches of all ranks
#: of the check's cell. Losses, norms and learning rates are compared with it.
REFERENCE_RUN = Run(
    "reference",
    ("build_model", *("reference",) * STEPS),
    strategy="ddp",
    world_size=1,
    # ``use_orig_params`` stays, because without it flat parameters may merge the groups of
    # ``param_groups``.
    only=(
        "model",
        "loaded",
        "grad_accum",
        "frozen",
        "lora",
        "param_groups",
        "use_orig_params",
        "optimizer",
        "ema",
        "set",
    ),
    follows=FOLLOWED,
)

#: The reference under autocast. It shows how far rounding alone moves a training, for a model of
#: the user's own.
ROUNDED_RUN = dataclasses.replace(
    REFERENCE_RUN, name="rounded", actions=("build_model", *("rounded",) * STEPS)
)

#: One trainer that trains three times: a training of five steps with a save, a second training of
#: three steps with a new schedule, and one that resumes from that save.
AGAIN_RUN = Run(
    "again",
    (
        *_BUILD,
        *("step",) * SAVED,
        "save",
        *("step",) * 2,
        "again",
        *("step",) * 3,
        "load",
        *("step",) * 2,
    ),
)
#: The same two trainings in one process.
AGAIN_REFERENCE_RUN = dataclasses.replace(
    REFERENCE_RUN,
    name="again_reference",
    actions=("build_model", *("reference",) * 5, "reference_again", *("reference",) * 3),
)

#: Loads the exported model with the model's own library, without the trainer. The base of an
#: adapter has the values and sizes that it had in the training.
RELOAD_RUN = Run(
    "reload",
    ("reload", "evaluate"),
    after="train",
    strategy="ddp",
    world_size=1,
    only=("model", "lora", "loaded"),
    follows=SIZES,
)

#: What a new adapter computes in one process, in float32, before any training; and what the model
#: computes without it.
ADAPTED_RUN = Run(
    "adapted",
    ("build_model", "evaluate"),
    strategy="ddp",
    precision="fp32",
    world_size=1,
    only=("model", "lora", "loaded", "set"),
    follows=(*ADAPTER, *SIZES),
)
UNADAPTED_RUN = dataclasses.replace(
    ADAPTED_RUN,
    name="unadapted",
    only=("model", "loaded", "set"),
    follows=SIZES,
)

#: A checkpoint directory whose name has spaces, separators, umlauts, and words that trainers search
#: paths for (https://github.com/huggingface/accelerate/pull/4119). REOPENED_RUN loads from it.
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

#: A file is in the place of the checkpoint's directory. It is put there before ``build``, because
#: some trainers look at the directory then.
BLOCKED_RUN = Run(
    "blocked",
    ("build_model", "damage", "build", "step", "save", "step"),
    directory="blocked here",
    damage="block",
)

#: A run that loads a checkpoint with a truncated or removed file. Rank 0 corrupts it before
#: ``build``, whose collectives keep the other ranks from loading too early.
TRUNCATED_RUN = Run(
    "truncated",
    ("build_model", "damage", "build", "load", "step"),
    first_step=3,
    after="train",
    damage="truncate",
)
REMOVED_RUN = dataclasses.replace(TRUNCATED_RUN, name="removed", damage="remove")
DAMAGED_RUNS = (TRUNCATED_RUN, REMOVED_RUN)

#: Gradients overflow in the second of three steps, as they do in float16 until the scaler has found
#: a scale that fits.
OVERFLOW_RUN = Run("overflow", (*_BUILD, "step", "overflow", "step"))

#: ROWS_RUN reads the data loaders for two epochs, and evaluates. RESUMED_ROWS_RUN resumes the
#: loaders at the beginning and in the middle of the second epoch. ALONE_RUN evaluates in one
#: process.
ROWS_RUN = Run("rows", ("rows", "metrics"))
RESUMED_ROWS_RUN = Run("resumed_rows", ("resumed_rows",), after="rows")
ALONE_RUN = Run("alone", ("metrics",), world_size=1, only=without(*MESH))
#: EXCHANGES_RUN calls the functions by which ranks exchange values.
EXCHANGES_RUN = Run("exchanges", ("exchanges",))

# Scenarios.

TRAIN = Scenario("train", (TRAIN_RUN,))
#: For cells with an adapter.
ADAPTED_TRAIN = Scenario("adapted_train", (TRAIN_RUN, ADAPTED_RUN, UNADAPTED_RUN))
RESUME = Scenario("resume", (TRAIN_RUN, RESUME_RUN))
EVALUATED_RESUME = Scenario("resume", (TRAIN_RUN, EVALUATED_RUN))
RESTARTS = Scenario("restarts", (TRAIN_RUN, SECOND_RUN, THIRD_RUN))
#: For a trainer that keeps several checkpoints in one directory.
RESTARTS_OF_BOTH = Scenario("restarts", (*RESTARTS.runs, FIRST_SAVE_RUN))
PARITY = Scenario("parity", (TRAIN_RUN, REFERENCE_RUN))
ROUNDED_PARITY = Scenario("parity", (TRAIN_RUN, REFERENCE_RUN, ROUNDED_RUN))
AGAIN = Scenario("again", (AGAIN_RUN, AGAIN_REFERENCE_RUN))
EXPORT = Scenario("export", (TRAIN_RUN, RELOAD_RUN))
PATHS = Scenario("paths", (NAMED_RUN, REOPENED_RUN, BLOCKED_RUN))
#: For a trainer that is given the directory when it is built. It should reject a bad one then.
BLOCKED_AT_BUILD_RUN = dataclasses.replace(BLOCKED_RUN, actions=("build_model", "damage", "build"))
PATHS_AT_BUILD = Scenario("paths", (NAMED_RUN, REOPENED_RUN, BLOCKED_AT_BUILD_RUN))
OVERFLOW = Scenario("overflow", (OVERFLOW_RUN,))
#: For a cell of DeepSpeed in precision ``fp8``: 8 bits without DeepSpeed, DeepSpeed without 8 bits,
#: then both.
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
EXCHANGES = Scenario("exchanges", (EXCHANGES_RUN,))
DAMAGE = Scenario("damage", (TRAIN_RUN, *DAMAGED_RUNS))


def reshard(cell: Cell, tp: int = 0) -> Scenario:
    """Return runs that load a checkpoint at another world size, and then back at the first.

    - ``up`` loads it at twice the world size; under tensor or pipeline parallelism at the same
      world size without this parallelism.
    - ``back`` loads what ``up`` saved in the cell itself, on ``tp`` tensor parallel ranks if that
      is not 0.
    - ``one`` loads the first checkpoint in one process. A cell of one rank has no such run.
    """
    world_size = cell.world_size
    # One step before the save, so that the second checkpoint differs from the first.
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
        in_one_process = Run(
            "one",
            (*_BUILD, "load", "step"),
            first_step=3,
            after="train",
            world_size=1,
            only=without(*MESH),
        )
        runs.append(in_one_process)
    return Scenario("reshard", tuple(runs))


def coverage(cell: Cell, loaders: Collection[Loader]) -> Scenario:
    """Return runs that read the rows of the trainer's data loaders.

    All loaders are read from the beginning. Those that can resume are resumed, too. Those that can
    resume at another world size are resumed on twice as many ranks, but not on a mesh: the rows
    that are left are shared among more ranks as they are without a mesh.

    Args:
        cell: The cell.
        loaders: What the driver says of each loader: whether it ``resumes``, and whether it
            ``moves``, that is, resumes at another world size.
    """
    runs = [ROWS_RUN]
    if any(loader.resumes for loader in loaders):
        runs.append(RESUMED_ROWS_RUN)
    on_mesh = any(name in MESH for name, _ in cell.options)
    any_moves = any(loader.moves for loader in loaders)
    if any_moves and not on_mesh:
        world_size = 2 * cell.world_size
        moved = Run("moved_rows", ("moved_rows",), after="rows", world_size=world_size)
        runs.append(moved)
    return Scenario("coverage", tuple(runs))


def port(strategy: str) -> Scenario:
    """Return runs that save under the cell's strategy and load under the given one.

    The run that loads does not keep options that only the cell's strategy may have: the mesh and
    ``use_orig_params``.
    """
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
    """Return runs that export under the cell's strategy, and train on under the given one.

    An export has only weights, so the optimizer is new.
    """
    moved = Run(
        "port",
        ("reload", "build", "step"),
        after="train",
        strategy=strategy,
        only=("model", "lora"),
    )
    return Scenario("portable", (TRAIN_RUN, moved))
