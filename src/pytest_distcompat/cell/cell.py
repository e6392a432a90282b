"""Cells: single points of the matrix, strategy x precision x world size x options.

A cell's id has all of it: ``fsdp2-bf16_upcast-w2-compile`` is FSDP2 with a model in bfloat16 whose
masters are in float32, on 2 ranks (the *world size*), with the option ``compile``. On 4 ranks over
two machines it begins ``fsdp2-bf16_upcast-w4-n2``. Ids are in the names of pytest items, in reports
and in the payloads of ranks; ``Cell.parse`` reads them back.

A suite's profile selects the cells of a session. In each of them the driver (the trainer under
test) configures the trainer as the cell says, and checks expect what the cell says.

A cell also says how its ranks form a device mesh, a grid whose innermost dimension has neighbours:
``pp`` (stages of a pipeline), then data parallel ranks, then ``cp`` (parts of a sequence), then
``tp`` (parts of a layer). With ``tp`` 2 on 4 ranks the pairs (0, 1) and (2, 3) are ``tp`` peers,
and each pair is fed a batch of its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pytest_distcompat.cell.options import FACETS, OPTIONS, OptionValue, check_option
from pytest_distcompat.cell.settings import setting_value
from pytest_distcompat.failures import UsageProblem, hides_frames
from pytest_distcompat.spread import COUNTS, Spread
from pytest_distcompat.user_input import check_count

#: pytest looks for this name: https://docs.pytest.org/en/stable/example/simple.html. With it the
#: traceback of a UsageProblem begins in the user's code.
__tracebackhide__ = hides_frames


class OnMachines(Protocol):
    """What says over how many machines ranks are spread: a cell, or a matrix of cells."""

    @property
    def nodes(self) -> int | None:
        """The number of machines; None if the session says it."""


@dataclass(frozen=True)
class Cell:
    """One point of the matrix: strategy x precision x world size x options.

    Options at their default are left out, so that the id is unique.
    """

    #: ``ddp``, ``fsdp2``, ``zero3``: a name of the registry ``strategies``.
    strategy: str
    #: ``fp32``, ``bf16_upcast``: a name of the registry ``precisions``.
    precision: str
    #: The number of ranks.
    world_size: int = 2
    #: Name and value of each option that is not at its default: ``(("tp", 2),)``.
    options: tuple[tuple[str, OptionValue], ...] = field(default=())
    #: The number of machines over which the ranks are spread.
    nodes: int = 1

    def __post_init__(self) -> None:
        # ``world_size`` and ``nodes``.
        for name in COUNTS:
            check_count(name, getattr(self, name))
        for name, value in self.options:
            check_option(name, value)
        # In the order of OPTIONS and without defaults, so that equal cells are equal objects.
        given = dict(self.options)
        options: list[tuple[str, OptionValue]] = []
        for name, option in OPTIONS.items():
            if name in given and given[name] != option.default:
                # ``listed`` makes 1 of True where the option lists numbers, and the other way
                # round: the two are equal, but ids spell them differently.
                options.append((name, option.listed(given[name])))
        # The dataclass is frozen.
        object.__setattr__(self, "options", tuple(options))
        self._check_mesh()

    def _check_mesh(self) -> None:
        """Raise UsageProblem unless the dimensions of the mesh divide the ranks.

        They are checked from the outermost to the innermost.
        """
        self._check_divides("pp", self.world_size, "ranks")
        ranks = self.world_size // self.pp
        words = "ranks"
        if self.pp > 1:
            words = "ranks, those of each stage of pp"
        self._check_divides("tp", ranks, words)
        words = "ranks"
        if self.tp > 1:
            words = "ranks, those of each part of tp"
        self._check_divides("cp", ranks // self.tp, words)
        words = "ranks"
        if self.dp_size < self.world_size:
            words = "data parallel ranks"
        self._check_divides("ep", self.dp_size, words)

    def _check_divides(self, name: str, ranks: int, words: str) -> None:
        """Raise UsageProblem unless the value of the option divides so many ranks.

        ``words`` names these ranks in the message.
        """
        size = int(self.option(name))
        if ranks % size:
            divisors: list[str] = []
            for value in OPTIONS[name].values:
                if ranks % int(value) == 0:
                    divisors.append(str(value))
            problem = f"{name} {size} does not divide {ranks} {words}"
            possible = ", ".join(divisors)
            raise UsageProblem(f"{problem}; with these {name} can be {possible}")

    @classmethod
    def of(cls, strategy: str, precision: str, world_size: int = 2, **options: OptionValue) -> Cell:
        """Return a cell, with its options as keyword arguments: ``model="mlp"``."""
        return cls(strategy, precision, world_size, tuple(options.items()))

    @classmethod
    def parse(cls, cell_id: str) -> Cell:
        """Return the cell that has this id. Raises UsageProblem for a text that is no cell id."""
        # STRATEGY-PRECISION-wRANKS[-nMACHINES][-OPTION]... An option is a token such as
        # ``compile`` or ``tp_2``.
        strategy, _, rest = cell_id.partition("-")
        precision, _, rest = rest.partition("-")
        world, *tokens = rest.split("-")
        names_world_size = world.startswith("w") and world[1:].isdecimal()
        if not strategy or not precision or not names_world_size:
            raise UsageProblem(
                f"{cell_id!r} is no cell id; one reads like 'fsdp2-bf16_upcast-w2-compile'"
            )
        machines = 1
        if tokens and re.fullmatch(r"n\d+", tokens[0]):
            machines = int(tokens.pop(0)[1:])
        option_by_token = _options_by_token(tokens)
        for token in tokens:
            if token not in option_by_token:
                known = ", ".join(option_by_token)
                raise UsageProblem(f"cell id {cell_id!r}: unknown part {token!r}. Known: {known}")
        options = tuple(option_by_token[token] for token in tokens)
        return cls(strategy, precision, int(world[1:]), options, machines)

    @property
    def id(self) -> str:
        """Return the id: ``fsdp2-bf16_upcast-w2-compile``, with ``w2-n2`` over two machines."""
        # The tokens of the spread are ``w2``, or ``w2`` and ``n2``.
        parts = [self.strategy, self.precision, *self.spread.tokens]
        for name, value in self.options:
            parts.append(OPTIONS[name].token(value))
        return "-".join(parts)

    @property
    def spread(self) -> Spread:
        """Return how many ranks it has, and over how many machines they are spread."""
        return Spread(self.world_size, self.nodes)

    def without(self, *names: str) -> Cell:
        """Return the same cell with these options at their defaults."""
        options: list[tuple[str, OptionValue]] = []
        for name, value in self.options:
            if name not in names:
                options.append((name, value))
        return dataclasses.replace(self, options=tuple(options))

    def spread_as(self, other: OnMachines) -> Cell:
        """Return the same cell over as many machines as the other one.

        A cell that names a number of machines itself keeps it. A matrix may name none (None): that
        is one machine.
        """
        machines = other.nodes or 1
        if machines == 1 or not self.spread.on_one:
            return self
        return dataclasses.replace(self, nodes=machines)

    def option(self, name: str) -> OptionValue:
        """Return the value of an option. Raises UsageProblem for an unknown name."""
        # No dictionary of the options: this is called for each name of each tensor.
        for known, value in self.options:
            if known == name:
                return value
        if name not in OPTIONS:
            raise UsageProblem(f"no option named {name!r}. Known: {', '.join(OPTIONS)}")
        return OPTIONS[name].default

    @property
    def own_disks(self) -> bool:
        """Tell whether each machine has a directory of its own for checkpoints.

        Option ``checkpoints=node`` says so: a disk that no other machine sees.
        """
        return self.option("checkpoints") == "node"

    @property
    def tp(self) -> int:
        """Return the size of tensor parallelism, the innermost dimension of a mesh.

        It is how many ranks, neighbours, hold the parts of each layer together.
        """
        return int(self.option("tp"))

    @property
    def only_tp(self) -> bool:
        """Tell whether tensor parallelism has all ranks, more than one.

        No ranks are left to shard over then, so that a wrapper is optional.
        """
        return self.tp == self.world_size > 1

    @property
    def cp(self) -> int:
        """Return the size of context parallelism, the dimension of a mesh outside of ``tp``.

        It is how many ranks hold the parts of each sequence together.
        """
        return int(self.option("cp"))

    @property
    def ep(self) -> int:
        """Return the size of expert parallelism: how many ranks hold the experts together.

        They are data parallel ranks and neighbours, each fed rows of its own.
        """
        return int(self.option("ep"))

    @property
    def pp(self) -> int:
        """Return the size of pipeline parallelism, the outermost dimension of a mesh.

        It is how many ranks hold the stages of the model.
        """
        return int(self.option("pp"))

    @property
    def stages(self) -> int:
        """Return the number of pipeline stages: ``pp``, twice that if they are interleaved.

        Under an interleaved schedule rank r holds stages r and r + pp.
        """
        if str(self.option("pp_schedule")).startswith("Interleaved"):
            return 2 * self.pp
        return self.pp

    @property
    def dp_size(self) -> int:
        """Return how many different batches a step has.

        Each rank has one of its own, but ranks of one pipeline, layer or sequence share one.
        """
        return self.world_size // (self.tp * self.cp * self.pp)

    def dp_rank(self, rank: int) -> int:
        """Return which of the ``dp_size`` batches of a step the rank is fed."""
        return rank // (self.tp * self.cp) % self.dp_size

    def tp_peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the parts of each layer together, this one included."""
        first = rank - rank % self.tp
        return tuple(range(first, first + self.tp))

    def cp_peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the parts of each sequence together, this one included."""
        # With tp 2 and cp 2 ranks 0 to 3 hold the same sequences; 0 and 2 are cp peers.
        size = self.tp * self.cp
        # The first of the ranks that hold these sequences, with all parts of their layers.
        block = rank - rank % size
        first = block + rank % self.tp
        return tuple(range(first, block + size, self.tp))

    def pp_peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the stages of one pipeline, in order, this one included."""
        ranks = self.world_size // self.pp
        return tuple(range(rank % ranks, self.world_size, ranks))

    @property
    def set(self) -> tuple[str, ...]:
        """Return the settings that option ``set`` has, one by one: ``("AdamW.lr=0.1",)``."""
        settings = str(self.option("set")).split("+")
        return tuple(setting for setting in settings if setting)

    def settings(self, name: str) -> dict[str, Any]:
        """Return the fields, with their values, that option ``set`` has for an object.

        Of ``AdamW.lr=0.1`` it returns ``{"lr": 0.1}`` for the name ``AdamW``. The object ``env`` is
        the environment, whose values are texts.
        """
        values: dict[str, Any] = {}
        for setting in self.set:
            if not setting.startswith(f"{name}."):
                continue
            field, text = setting.removeprefix(f"{name}.").split("=", 1)
            value: Any = text
            if name != "env":
                # The number 0.1 for the text ``0.1``, False for ``false``.
                value = setting_value(text)
            values[field] = value
        return values

    def with_settings(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments with those that option ``set`` has for the object of that name.

        Dots in the name of a setting lead into nested arguments: ``ds_config.optimizer.type=SGD``
        replaces ``{"optimizer": {"type": "AdamW"}}``.
        """
        arguments = dict(given)
        for path, value in self.settings(name).items():
            *outer, last = path.split(".")
            inner = arguments
            for key in outer:
                # A copy: the given ones are not changed.
                nested = dict(inner.get(key) or {})
                inner[key] = nested
                inner = nested
            inner[last] = value
        return arguments

    def facets(self) -> dict[str, OptionValue | int]:
        """Return every facet with its value, including options at their default.

        Facets are what an expectation may name to say which cells it is about: ``{"strategy":
        "fsdp2", "precision": "fp32", "world_size": 2, "nodes": 1, "compile": False, ...}``.
        """
        values: dict[str, OptionValue | int] = {}
        for name in FACETS:
            if name in OPTIONS:
                values[name] = self.option(name)
            else:
                values[name] = getattr(self, name)
        return values

    def own_facets(self) -> dict[str, OptionValue | int]:
        """Return the facets in which the cell differs from the defaults.

        Strategy, precision and world size are always among them; the number of machines is if it is
        more than 1: ``{"strategy": "fsdp2", "precision": "fp32", "world_size": 2, "tp": 2}``.
        """
        values: dict[str, OptionValue | int] = {
            "strategy": self.strategy,
            "precision": self.precision,
        }
        return {**values, **self.spread.numbers, **dict(self.options)}

    def __str__(self) -> str:
        return self.id


def _options_by_token(tokens: Sequence[str]) -> dict[str, tuple[str, OptionValue]]:
    """Return each option and value by its token in a cell id.

    These are all listed values, and those of ``tokens`` that fit an option's pattern. Examples:
    ``{"compile": ("compile", True), "tp_2": ("tp", 2), "model_hf:bert": ("model", "hf:bert")}``.
    """
    options: dict[str, tuple[str, OptionValue]] = {}
    for option in OPTIONS.values():
        for value in option.values:
            options[option.token(value)] = (option.name, value)
    for option in OPTIONS.values():
        for token in tokens:
            text = token.removeprefix(f"{option.name}_")
            # Only an option with a pattern accepts values that it does not list.
            if option.accepts(text):
                options[option.token(text)] = (option.name, text)
    return options
