"""Base class of drivers: the trainer under test, as a few methods.

An adopter of this package subclasses ``Driver`` for a trainer and names the class in a suite,
``driver = "my_trainer.testing:Driver"``. A *suite* is a test class; a *cell* is one point of its
matrix, such as ``fsdp2-fp32-w2``; a *check* is one claim about each cell. A *run* is one process
group from start to end. For each run every rank makes one driver with the run's cell, and
``worker`` has it perform a list of *actions*: ``build_model``, ``build``, ``step``, ``save``,
``load``. After each of them the probe, code of this package on the rank, reads the attributes of
``LiveTrainer``. pytest's process imports the class too, and calls only its class methods.

Most classes here are *abilities*: ``Exports`` has the methods for the check ``export``, say. A
driver has an ability if it overrides the methods. All others are inherited from ``Driver``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.calls import CALL
from pytest_distcompat.law import law_of
from pytest_distcompat.trace import ExtraState, LoadedBatch, Loader

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.exchanges import Exchange
    from pytest_distcompat.world import World

#: The actions that are an optimizer step; ``overflow`` is one whose gradients overflow.
STEP_ACTIONS = frozenset({"step", "overflow"})

#: (Epoch, batch), both from 0, at which a loader is resumed: between two epochs, and in the middle
#: of the second.
RESUME_AT = ((1, 0), (1, 2))

#: The methods that every driver must have; a driver with its own ``train`` needs ``build_model``
#: alone.
REQUIRED_METHODS = ("build_model", "build", "step", "save", "load")

#: ``worker``'s function, called after each action so that the probe reads: ``report("build")``;
#: after a step with the loss on this rank, ``report("step", 0.7)``; after a call with its result.
OnAction = Callable[..., None]


@dataclass(frozen=True)
class Plan:
    """Actions of one trainer in a run, in order, without ``build_model``.

    Attributes:
        actions: Names out of ``build``, ``load``, ``step``, ``overflow``, ``save`` and ``again``
            (begin a second training), or a call of the live trainer, ``call step(clip='no')``.
        first_step: The number of the first step, from 0; more than 0 after a load.
        save_to: The directory to save into; it exists and is the same for all ranks, for those of
            one node in a cell with ``checkpoints="node"``.
        load_from: The directory to load from, of which the same is true.
        loads_first: Whether ``load`` is to load the first of the checkpoints there, not the last.
    """

    actions: tuple[str, ...]
    first_step: int
    save_to: Path
    load_from: Path
    loads_first: bool = False

    @property
    def last_step(self) -> int:
        """Return the number of steps taken at the end of the plan, including those before it."""
        return self.first_step + len(self.steps)

    def trainings(self) -> list[Plan]:
        """Return the plan cut into trainings, of which one trainer may do several.

        Each but the first begins with ``again``, or with a ``load`` of what the first one saved:
        ``build, step, save, step, load, step`` are two. The second goes on at the step at which the
        first saved; after ``again`` steps count from 0.
        """
        starts = [0]
        for index, action in enumerate(self.actions):
            loads_own_save = action == "load" and "save" in self.actions[:index]
            if action == "again" or loads_own_save:
                starts.append(index)
        trainings: list[Plan] = []
        for start, end in zip(starts, [*starts[1:], len(self.actions)], strict=True):
            first_step = self.first_step
            if self.actions[start] == "again":
                first_step = 0
            elif start:
                # It begins with a load.
                actions_before_save = self.actions[: self.actions.index("save")]
                until_save = replace(self, actions=actions_before_save)
                first_step = until_save.last_step
            trainings.append(replace(self, actions=self.actions[start:end], first_step=first_step))
        return trainings

    def next_steps(self) -> list[int]:
        """Return for each action the number of the next step after it: ``[0, 1]`` for build, step.

        By it ``worker`` knows which step the trainer takes next.
        """
        next_steps: list[int] = []
        for training in self.trainings():
            number = training.first_step
            for action in training.actions:
                if action in STEP_ACTIONS:
                    number += 1
                next_steps.append(number)
        return next_steps

    @property
    def steps(self) -> tuple[str, ...]:
        """Return the actions that are a step."""
        steps = []
        for action in self.actions:
            if action in STEP_ACTIONS:
                steps.append(action)
        return tuple(steps)


def _missing(driver: Driver, action: str) -> str:
    """Return the message about a method that a driver lacks."""
    return (
        f"{type(driver).__name__} has no {action}(); a driver needs {', '.join(REQUIRED_METHODS)}"
    )


class LiveTrainer:
    """The trainer of one rank in one run.

    It has what a driver knows from its start, and what a probe reads after each action.

    Args:
        cell: The cell of the run, which says how to train: ``cell.strategy``, ``cell.precision``,
            ``cell.option("grad_accum")``.
        world: This process as a rank: its ``rank``, the number of ranks ``size``, its ``device``.
    """

    #: The model as the trainer has it, wrapped or not.
    model: Any = None
    #: The optimizer; several are a list.
    optimizer: Any = None
    #: The learning rate scheduler, where there is one.
    scheduler: Any = None
    #: The gradient scaler of fp16, where there is one; after ``build`` its scale is lowered if the
    #: first steps would overflow.
    scaler: Any = None
    #: The gradient norm of the last step, before clipping, if the trainer reports it.
    grad_norm: float | None = None
    #: How many tokens (or samples) this rank trained on in the last step.
    tokens: int = 0

    def __init__(self, cell: Cell, world: World) -> None:
        self.cell = cell
        self.world = world


# Abilities that a driver may have: each is a method or a few, and the checks that need them are not
# applicable without. A driver has an ability by overriding its methods.


class Exports(LiveTrainer):
    """Ability to write weights for use elsewhere, which the check ``export`` loads again."""

    def export(self, directory: Path) -> None:
        """Write the trained weights: whole tensors, the unwrapped model's names, no optimizer.

        They are for use elsewhere.
        """
        raise NotImplementedError

    def reload(self, directory: Path) -> Module:
        """Load what ``export`` wrote as users do, and return the unwrapped model.

        That is done in one process, without the trainer. The model may be on any device: it is
        moved to that of this rank, ``self.world.device``.
        """
        raise NotImplementedError

    def evaluate(self, model: Module) -> torch.Tensor:
        """Return what a model computes on one fixed batch, the same on every rank; any shape.

        The model is the trained or the reloaded one. A model that ``torch.compile`` wraps is run
        uncompiled here.
        """
        raise NotImplementedError


class HasReference(LiveTrainer):
    """Ability to repeat the training in one process, as the reference of some checks.

    The checks ``parity``, ``clipping`` and ``gradients`` compare with it. A driver has it by
    ``loss`` and ``make_optimizer``, from which ``reference`` is derived, or by a ``reference`` of
    its own.
    """

    #: What has an equal weight in the gradients of a step, over all ranks: ``token``, ``row``,
    #: ``micro_batch``, ``joint_micro_batch`` (of all ranks together) or ``rank``. Empty where the
    #: driver does not say.
    mean: ClassVar[str] = ""
    #: The norm to which the trainer clips gradients, for the derived reference; None if it does not
    #: clip.
    max_norm: float | None = None
    #: What the loss of the reference's last step would be as another mean: what counts alike in
    #: the mean -> loss, ``{"each token": 0.71, "each rank": 0.69}``. A finding about a wrong loss
    #: names the mean that it is equal to. A ``reference`` of the driver's own may set it.
    averages: Mapping[str, float] = MappingProxyType({})

    def reference(self, model: Module, number: int, ranks: int) -> float:
        """Take step ``number`` of the same training in one process, and return the loss.

        It is done without the trainer.

        Derived for a driver with ``loss`` and ``make_optimizer``: the mean of the ranks' losses,
        gradients clipped to ``max_norm``, with ``make_scheduler``. A derived reference repeats a
        mistake of ``loss``, such as a division by the rank's own number of tokens. A driver that
        overrides this sets ``self.optimizer`` and ``self.grad_norm`` as in ``step``.

        Args:
            model: The unwrapped model, in float32, on this rank's device: ``self.world.device``.
            number: The number of the step; train on batch ``number`` of every rank.
            ranks: How many data-parallel ranks the compared run has; ``self.cell.world_size`` is
                the same number here.
        """
        import torch

        if self.optimizer is None:
            self.optimizer = self.make_optimizer(model)
            self.scheduler = self.make_scheduler(self.optimizer)
        self.optimizer.zero_grad()
        total = 0.0
        for rank in range(ranks):
            loss = self.loss(model, number, rank) / ranks
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_norm or float("inf"))
        self.grad_norm = float(norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return total

    def loss(self, model: Module, number: int, rank: int) -> torch.Tensor:
        """Return the loss on batch ``number`` of that rank, without a backward pass.

        The model may be unwrapped or not. In the derived reference ``self.world`` is that of one
        process, ``self.cell.world_size`` that of the compared run.
        """
        raise NotImplementedError

    def make_optimizer(self, model: Module) -> Any:
        """Return the trainer's optimizer for that model."""
        raise NotImplementedError

    def make_scheduler(self, optimizer: Any) -> Any:  # noqa: ARG002 - for those who override it
        """Return the scheduler of an optimizer, stepped after it; None without one."""
        return None


class HasLossScaling(LiveTrainer):
    """Ability to take a step whose gradients overflow, for the check ``scaling`` of fp16."""

    def overflow(self, number: int) -> float:
        """Do a ``step`` with infinite gradients in the first layer, on the highest rank alone.

        The gradients of all other layers are finite.
        """
        raise NotImplementedError


class HasLoaders(LiveTrainer):
    """Ability to show which rows the trainer's loaders give to each rank.

    The check ``coverage`` needs it.
    """

    #: The trainer's loaders that ``rows`` knows: a name of the driver's own -> what to expect of
    #: it, such as ``{"sampler": Loader(shuffled=False)}``.
    loaders: ClassVar[Mapping[str, Loader]] = {}

    @classmethod
    def loaders_in(cls, cell: Cell) -> Mapping[str, Loader]:  # noqa: ARG003 - for those who override it
        """Return those of ``loaders`` that can be made in a cell; by default all.

        Some cannot be made on the mesh of a cell, for example.
        """
        return cls.loaders

    def rows(
        self, loader: str, count: int, start: tuple[int, int], directory: Path
    ) -> Iterator[tuple[int, Sequence[int]] | LoadedBatch]:
        """Yield each batch of this rank in two epochs: epoch, and numbers of rows, ``0, [3, 7]``.

        Rows are numbers out of ``range(count)``. ``build`` was not called: start the process group
        here if the loader needs it. ``LoadedBatch`` also has the loader's length, from which steps
        and learning rates are computed. An exception ends the run: the failure names the loader,
        and those after it are not read.

        Args:
            loader: One of ``loaders``.
            count: The number of rows, which does not divide by the ranks.
            start: Epoch and batch to begin at; where both are 0, save what a later run needs to
                begin at ``RESUME_AT``.
            directory: Where to save, and what to resume from.
        """
        raise NotImplementedError


class HasMetrics(LiveTrainer):
    """Ability to evaluate over several ranks, for the check ``evaluation``."""

    def metrics(self, count: int) -> Mapping[str, float]:
        """Return metrics over rows ``range(count)`` by name, for each way of evaluation.

        They are the ways in which the trainer evaluates. The check ``evaluation`` has it called in
        one process too, and compares each rank's metrics with those of it by name. ``build`` was
        not called.
        """
        raise NotImplementedError

    @classmethod
    def evaluates_in(cls, cell: Cell) -> bool:  # noqa: ARG003 - for those who override it
        """Tell whether ``metrics`` evaluates as the cell's training would; by default always."""
        return True


class HasExchanges(LiveTrainer):
    """Ability to exchange values between ranks, by functions that users call.

    The check ``exchanges`` needs it.
    """

    def exchanges(self) -> Mapping[str, Exchange]:
        """Return functions by which ranks exchange values, by name: ``{"gather": Exchange(...)}``.

        ``build`` was not called: start the process group here.
        """
        raise NotImplementedError


class RenamesKeys(LiveTrainer):
    """How names in saved files differ from those of the unwrapped model. By default they do not."""

    def saved_name(self, key: str) -> str:
        """Return the unwrapped model's name for a key that the trainer renames when it saves.

        It is called for each key of a model or an optimizer in each saved file.
        """
        return key

    def written_names(self, model: Module) -> Collection[str]:  # noqa: ARG002 - for those who override it
        """Return names that files have in place of the unwrapped model's own; by default none.

        They are for a library that writes other names: for tensors that are joined or split when
        they are written, which ``saved_name`` cannot express.
        """
        return ()


class HasExtraState(LiveTrainer):
    """State that training depends on, for the check ``extra_state``.

    It is state beside model, optimizer, scheduler and scaler.
    """

    #: Name of an attribute of the driver, such as ``trainer.ema`` -> what to expect of it:
    #: ``ExtraState()`` says that it changes in training, is alike on all ranks, and comes back with
    #: a checkpoint. The attribute is a tensor, a module, a number, text, a collection of them, or
    #: an object with ``state_dict()``.
    extra_state: ClassVar[Mapping[str, ExtraState]] = {}

    @classmethod
    def extra_state_in(cls, cell: Cell) -> Mapping[str, ExtraState]:  # noqa: ARG003 - overridden
        """Return the states that a driver of the cell has; by default all of ``extra_state``."""
        return cls.extra_state


class KeepsSaves(LiveTrainer):
    """Ability to load an earlier checkpoint.

    It is the first of two in one directory for the check ``restarts``, the best one for ``best``.
    """

    @classmethod
    def keeps_saves(cls, cell: Cell) -> bool:  # noqa: ARG003 - for those who override it
        """Tell whether a second save leaves the first one where it is; by default it does not."""
        return False

    @classmethod
    def loads_best(cls, cell: Cell) -> bool:  # noqa: ARG003 - for those who override it
        """Tell whether training ends with the weights of its best checkpoint."""
        return False

    def load_first(self, directory: Path) -> None:
        """Load the first of two checkpoints that ``save`` wrote there in another process group."""
        raise NotImplementedError


class TrainsAgain(LiveTrainer):
    """Ability to begin a second training in the same trainer, for the check ``again``."""

    def again(self) -> None:
        """Begin a second training in the trainer that trained before, with batch 0.

        Its schedule begins anew, and its optimizer keeps its state: override ``reference_again``
        for a trainer that does otherwise.
        """
        raise NotImplementedError

    def reference_again(self) -> None:
        """Begin the second training of the reference, which ``reference`` goes on with.

        By default the optimizer keeps its state, and gets a new schedule.
        """
        assert isinstance(self, HasReference)
        self.scheduler = self.make_scheduler(self.optimizer)


class HasPipeline(LiveTrainer):
    """What a driver with pipeline parallelism says of its pipeline.

    Each rank holds some stages: consecutive layers of the model.
    """

    #: The process group of the ranks that hold the stages of one pipeline, in their order; None if
    #: each rank has the whole model.
    pp_group: Any = None
    #: Under pipeline parallelism the micro-batches of the last step as this rank read them. The
    #: inputs of its modules do not show them: later stages are fed activations.
    fed: Sequence[Any] = ()


class HasBlocks(LiveTrainer):
    """Which modules a driver treats one by one, and which it leaves alone."""

    #: Class names of the modules to shard, checkpoint and compile one by one.
    blocks: tuple[str, ...] = ()
    #: Names of the modules to leave out of the sharding.
    ignored_modules: tuple[str, ...] = ()


class HasLiveCalls(LiveTrainer):
    """What users call on the live trainer in any order, as in a loop of their own."""

    #: What users call on the live trainer: a subclass of ``drivers.Calls``, with a method for each
    #: call. None if the driver declares none.
    live_calls: ClassVar[Any] = None
    #: The instance of ``live_calls`` that ``worker`` makes, which performs ``call step()``.
    caller: Any = None


class Driver(
    Exports,
    HasReference,
    HasLossScaling,
    HasLoaders,
    HasMetrics,
    HasExchanges,
    HasExtraState,
    KeepsSaves,
    TrainsAgain,
    RenamesKeys,
    HasPipeline,
    HasBlocks,
    HasLiveCalls,
):
    """The trainer under test: subclass it and write five methods.

    A suite names the class as ``module:attribute``.

    Every rank makes one driver for each run and calls its methods in order. After each action a
    probe reads ``self.model``, ``self.optimizer`` and ``self.scheduler``. Set them in ``build``, as
    your trainer has them: the model may be wrapped, and several optimizers (``torch.optim.Muon``
    needs a second one) are a list. The probe only reads; it never calls your code.

    pytest imports the class too, to find out what it supports. Importing torch at module level
    makes collection slower.

    ``build_model``, ``build``, ``step``, ``save`` and ``load`` are required. ``export``,
    ``reload``, ``evaluate``, ``reference`` and ``overflow`` enable further checks, which are
    reported as not applicable without them. ``reference`` is derived for a driver with ``loss`` and
    ``make_optimizer``.
    """

    # What it is.

    #: The driver's name in its registry.
    name: ClassVar[str] = ""
    #: Position in lists of drivers.
    order: ClassVar[int] = 100
    #: The libraries whose known issues concern this driver: ``("accelerate", "torch")``.
    libraries: ClassVar[tuple[str, ...]] = ()
    #: Modules that the fork server imports before the first rank starts, so that ranks need not
    #: import them.
    preload: ClassVar[tuple[str, ...]] = ()

    # What it supports.

    #: The options of a cell that this driver supports; a cell with another option is not run, and
    #: the report says why.
    options: ClassVar[tuple[str, ...]] = ()
    #: Option (``tp``), option with a value (``tp_4``), or several options together (``tp+ep``) ->
    #: other options without which the driver does not support it, with their values: ``{"tp_4":
    #: {"model": "mlp"}}``. A profile that makes a cell with ``tp_4`` adds them.
    needs_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    #: Strategies whose checkpoints can be loaded at another world size.
    reshards: ClassVar[tuple[str, ...]] = ()
    #: Strategy -> the other strategy that can load its checkpoints.
    portable: ClassVar[Mapping[str, str]] = {}
    #: Whether the trainer knows where it will save when it is built, and must refuse a bad place
    #: before it trains.
    knows_directory: ClassVar[bool] = False
    #: Whether the trainer must leave torch's settings of the process as they are, such as threads
    #: and default dtype: then ``active`` compares them. A trainer may set them on purpose.
    keeps_settings: ClassVar[bool] = False

    @classmethod
    def unsupported_reason(cls, cell: Cell, device: str = "cpu") -> str | None:  # noqa: ARG003 - for those who override it
        """Return why this driver cannot run the cell on that device; None if it can.

        The device is ``cpu`` or ``cuda``. The reason is one sentence; reports show it.
        """
        for name, _ in cell.options:
            if name not in cls.options:
                return f"the {cls.name or cls.__name__} driver does not support option {name!r}"
        # The law of a cell is how checks judge it. An extension may bring another one for its own
        # cells, and refuse to run them with some drivers.
        return law_of(cell).unsupported_reason(cls, cell)

    @classmethod
    def can(cls, action: str) -> bool:
        """Return whether the driver has an optional method, or those from which it is derived.

        Args:
            action: The name of the method: ``export``.
        """
        if action == "reference" and cls.reference is Driver.reference:
            return cls.can("loss") and cls.can("make_optimizer")
        return getattr(cls, action) is not getattr(Driver, action)

    # What every trainer does. A driver with its own ``train`` needs ``build_model`` alone.

    def build_model(self) -> Module:
        """Return the unwrapped model, on the CPU, in the precision's load dtype.

        It is what a user hands to the trainer.
        """
        raise NotImplementedError(_missing(self, "build_model"))

    def build(self, model: Module) -> None:
        """Build the trainer: wrap the model, make the optimizer, and set the attributes.

        Make the scheduler too. The attributes are ``model``, ``optimizer`` and ``scheduler``.
        """
        raise NotImplementedError(_missing(self, "build"))

    def step(self, number: int) -> float:
        """Take one optimizer step on batch ``number`` of this rank and return this rank's loss.

        Returns:
            The mean over this rank's rows or tokens, scaled so that the average over ranks is the
            loss of all; or this rank's part of a sum, if the trainer sums gradients over ranks. Of
            micro-batches, the loss of all together.
        """
        raise NotImplementedError(_missing(self, "step"))

    def save(self, directory: Path) -> None:
        """Write a checkpoint to resume from; the directory exists, the same for all ranks.

        See ``Plan``.
        """
        raise NotImplementedError(_missing(self, "save"))

    def load(self, directory: Path) -> None:
        """Load a checkpoint that ``save`` wrote in another process group."""
        raise NotImplementedError(_missing(self, "load"))

    def train(self, model: Module, plan: Plan, report: OnAction) -> None:
        """Perform the plan's actions in order and report each when it is done.

        Override this instead of the single methods for a trainer that does several actions in one
        call and reports them by callbacks.

        Args:
            model: The model that ``build_model`` returned.
            plan: The actions, and where to save and load.
            report: Called as ``report(action)`` after each action, after a step as ``report("step",
                loss)``.
        """
        for training in plan.trainings():
            self._train_once(model, training, report)

    def _train_once(self, model: Module, plan: Plan, report: OnAction) -> None:
        """Perform a plan of one training, whose steps count from ``plan.first_step``."""
        number = plan.first_step
        for action in plan.actions:
            if action in STEP_ACTIONS:
                take_step = getattr(self, action)
                report(action, take_step(number))
                number += 1
            elif action.startswith(CALL):
                # ``call step(clip='no')``: ``caller`` gets what follows the first word.
                result = self.caller.perform(action.removeprefix(CALL))
                report(action, result)
            elif action == "build":
                self.build(model)
                report(action)
            elif action == "save":
                self.save(plan.save_to)
                report(action)
            elif action == "again":
                self.again()
                report(action)
            elif plan.loads_first:
                self.load_first(plan.load_from)
                report(action)
            else:
                self.load(plan.load_from)
                report(action)

    def loads_file(self, path: PurePath) -> bool:  # noqa: ARG002 - for those who override it
        """Tell whether ``load`` reads a file of a checkpoint.

        The check ``damage`` spoils one that it does. Beside what it resumes from a trainer may save
        the weights for others to use.

        Args:
            path: The path of the file in the directory of the checkpoint.
        """
        return True

    def trainer_world_size(self) -> int | None:
        """Return the number of ranks that the trainer assumes; None if unknown."""
        return None
