"""Cells of the matrix: strategy x precision x world size x options.

A cell also says over how many machines its ranks are spread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_distcompat.failures import UsageProblem, hides_frames
from pytest_distcompat.installed import version_of
from pytest_distcompat.spread import COUNTS, Spread
from pytest_distcompat.user_input import check_count

#: pytest looks for this name: https://docs.pytest.org/en/stable/example/simple.html
__tracebackhide__ = hides_frames

OptionValue = bool | str | int


@dataclass(frozen=True)
class Option:
    """One further axis of a cell, such as ``tp`` or ``model``.

    The first of the values is the default. Texts that match ``pattern`` are values too.
    """

    name: str
    values: tuple[OptionValue, ...]
    meaning: str
    pattern: str = ""

    @property
    def default(self) -> OptionValue:
        """Return the value that a cell has if it does not name the option."""
        return self.values[0]

    def accepts(self, value: OptionValue) -> bool:
        """Tell whether the option has that value."""
        if value in self.values:
            return True
        if not self.pattern:
            return False
        return re.fullmatch(self.pattern, str(value)) is not None

    def listed(self, value: OptionValue) -> OptionValue:
        """Return the value as the option lists it.

        ``True`` equals 1, and a cell id spells the two differently.
        """
        for known in self.values:
            if known == value:
                return known
        return value

    def token(self, value: OptionValue) -> str:
        """Return the value as a cell id spells it.

        Examples: ``compile``, ``no_use_orig_params``, ``model_mlp``.
        """
        if value is False:
            return f"no_{self.name}"
        if value is True:
            return self.name
        return f"{self.name}_{value}"


#: One setting of a library; a cell's id has hyphens, an item's square brackets around what they
#: hold.
_SETTING = r"\w+\.[\w.]+=[^\s+\[\]-]+"

#: Without transformers the default is what needs none, so that a first run has cells, and known
#: issues know which.
_FIRST_MODELS = ("llama", "llama_tied", "mlp")
if not version_of("transformers"):
    _FIRST_MODELS = ("mlp", "llama", "llama_tied")

OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option(
            "model",
            (
                *_FIRST_MODELS,
                "twice",
                "odd",
                "scalar",
                "transposed",
                "branch",
                "dropout",
                "wrapper_names",
                "llama_dropout",
                "batchnorm",
                "syncbatchnorm",
                "moe",
                "moe_fused",
                "moe_deepspeed",
                "wide",
            ),
            "which tiny model the built-in drivers train; "
            "`hf:MODEL_TYPE` or `hf:CLASS` is an architecture of transformers",
            pattern=r"hf:\w+",
        ),
        Option("state_dict", ("sharded", "full"), "the form in which FSDP writes a checkpoint"),
        Option(
            "compile",
            (False, True, "aot_eager", "regional", "partial"),
            "torch.compile: the whole model by inductor (True) or aot_eager, each block by itself, "
            "or one block only",
        ),
        Option(
            "activation_checkpointing",
            (False, True, "selective", "reentrant", "deepspeed"),
            "recompute activations in the backward pass; `selective` keeps those of matrix "
            "products, `reentrant` runs a backward pass of its own for each block, `deepspeed` is "
            "`deepspeed.checkpointing`",
        ),
        Option("grad_accum", (1, 2, 4), "micro-batches an optimizer step"),
        Option(
            "cpu_offload",
            (False, True),
            "keep optimizer state (and shards, where the strategy can) in host memory",
        ),
        Option(
            "reshard_after_forward",
            (True, False),
            "free gathered parameters between forward and backward (FSDP)",
        ),
        Option(
            "dp_replicate",
            (1, 2),
            "copies of the shards: hybrid sharding (HSDP), "
            "in groups of ranks that hold a copy each",
        ),
        Option(
            "tp",
            (1, 2, 4),
            "ranks that hold the parts of each layer: tensor parallelism; "
            "the others are data parallel",
        ),
        Option(
            "sp",
            (False, True),
            "sequence parallelism: ranks of tensor parallelism cut what lies between their layers "
            "along the sequence",
        ),
        Option(
            "cp",
            (1, 2, 4),
            "ranks that hold the parts of each sequence: context parallelism, DeepSpeed's "
            "`sequence_parallel_size`; they shard parameters as data parallel ranks do",
        ),
        Option(
            "ep",
            (1, 2, 4),
            "data parallel ranks that hold the experts of a model together: expert parallelism",
        ),
        Option(
            "pp",
            (1, 2, 4),
            "ranks that hold the stages of the model: pipeline parallelism; "
            "the ranks of each stage are data parallel",
        ),
        Option(
            "pp_schedule",
            ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble"),
            "the order of micro-batches in a pipeline, by torch's name",
        ),
        Option(
            "use_orig_params",
            (True, False),
            "FSDP1: parameters keep their own tensors, or live in a flat one",
        ),
        Option(
            "cpu_ram_efficient_loading",
            (False, True),
            "only rank 0 holds the weights before they are sharded",
        ),
        Option(
            "meta_init", (False, True), "the model is made without memory and filled after sharding"
        ),
        Option(
            "wrap_policy",
            ("blocks", "size"),
            "what becomes a unit of FSDP: the model's blocks, or whatever is large enough",
        ),
        Option(
            "loaded",
            ("given", "from_pretrained", "from_backbone", "from_config", "zero_init"),
            "the model is given, or the trainer makes it: from its files, "
            "from files without the head (which is drawn anew), "
            "from its config, or under `deepspeed.zero.Init`; the last two are filled",
        ),
        Option("ignored_modules", (False, True), "a frozen module is excluded from sharding"),
        Option("frozen", (False, True), "a part of the model is not trained"),
        Option(
            "lora",
            (False, True, "int8"),
            "a PEFT LoRA adapter is trained, nothing else; "
            "`int8`: on a model that torchao quantizes, beside its last layer",
        ),
        Option(
            "param_groups",
            (False, True),
            "two groups of parameters: with weight decay, and without for norms and biases",
        ),
        Option("save_only_model", (False, True), "checkpoints hold the model alone"),
        Option("fp8_backend", ("torchao", "te"), "which library converts layers to 8 bits"),
        Option(
            "float32_norms",
            (False, True),
            "norms are loaded in float32, whatever all else is loaded in: a model of two dtypes",
        ),
        Option(
            "grad_accum_dtype",
            ("auto", "fp32"),
            "DeepSpeed: what gradients are added up in; auto is the parameters' dtype",
        ),
        Option(
            "reduce_dtype",
            ("auto", "fp32"),
            "what gradients travel in, where the strategy can say so: "
            "auto is the dtype that products run in",
        ),
        Option(
            "optimizer",
            ("adamw", "sgd", "adafactor", "muon", "adam8bit"),
            "what updates the parameters; `muon` leaves all but matrices to AdamW, "
            "`adam8bit` is torchao's AdamW8bit",
        ),
        Option(
            "packed",
            (False, True),
            "the rows of a micro-batch are joined into one without padding, "
            "in which each attends to itself alone",
        ),
        Option("async_save", (False, True), "checkpoints are written while training goes on"),
        Option(
            "ema",
            (False, True),
            "an average of the weights is kept beside the model: torch's `AveragedModel`, "
            "or an object that accelerate registers",
        ),
        Option(
            "checkpoints",
            ("shared", "node"),
            "where they are: in a directory that all nodes share, "
            "or on each node in one of its own",
        ),
        Option(
            "conflict",
            (False, True),
            "the DeepSpeed JSON asks for another precision than the trainer",
        ),
        Option(
            "set",
            ("",),
            "settings of the libraries, as `DataLoaderConfiguration.even_batches=false`, "
            "with `+` between several",
            pattern=rf"{_SETTING}(\+{_SETTING})*",
        ),
    )
}

#: What an expectation may name besides the options.
FACETS = ("strategy", "precision", *COUNTS, *OPTIONS)


def check_option(name: str, value: OptionValue) -> None:
    """Raise UsageProblem, listing what exists, for an option or a value that does not."""
    if name not in OPTIONS:
        raise UsageProblem(f"no option named {name!r}. Known: {', '.join(OPTIONS)}")
    if not OPTIONS[name].accepts(value):
        known = ", ".join(map(repr, OPTIONS[name].values))
        raise UsageProblem(f"option {name!r} has no value {value!r}. Known: {known}")


@dataclass(frozen=True)
class Cell:
    """One point of the matrix: strategy x precision x world size x options.

    Options at their default are left out, so that the id is unique.
    """

    strategy: str
    precision: str
    world_size: int = 2
    options: tuple[tuple[str, OptionValue], ...] = field(default=())
    nodes: int = 1

    def __post_init__(self) -> None:
        for name in COUNTS:
            check_count(name, getattr(self, name))
        for name, value in self.options:
            check_option(name, value)
        given = dict(self.options)
        options: list[tuple[str, OptionValue]] = []
        for name, option in OPTIONS.items():
            if name in given and given[name] != option.default:
                options.append((name, option.listed(given[name])))
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
        """Raise UsageProblem unless the value of the option divides so many ranks."""
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

    def spread_as(self, other: Cell | Matrix) -> Cell:
        """Return the same cell over as many machines as the other one.

        A cell that names a number of machines itself keeps it.
        """
        machines = other.nodes or 1
        if machines == 1 or not self.spread.on_one:
            return self
        return dataclasses.replace(self, nodes=machines)

    def option(self, name: str) -> OptionValue:
        """Return the value of an option. Raises UsageProblem for an unknown name."""
        # No dictionary of the options: it is asked for each name of each tensor.
        for known, value in self.options:
            if known == name:
                return value
        if name not in OPTIONS:
            raise UsageProblem(f"no option named {name!r}. Known: {', '.join(OPTIONS)}")
        return OPTIONS[name].default

    @property
    def own_disks(self) -> bool:
        """Tell whether each machine has a directory of its own for checkpoints.

        See ``World.own_disks``.
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
        """Return which of these batches the rank is fed."""
        return rank // (self.tp * self.cp) % self.dp_size

    def tp_peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the parts of each layer together, this one included."""
        first = rank - rank % self.tp
        return tuple(range(first, first + self.tp))

    def cp_peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the parts of each sequence together, this one included."""
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
        """Return the settings that option ``set`` has, one by one."""
        settings = str(self.option("set")).split("+")
        return tuple(setting for setting in settings if setting)

    def settings(self, name: str) -> dict[str, Any]:
        """Return the fields, with their values, that option ``set`` has for an object.

        The object ``env`` is the environment, whose values are texts.
        """
        values: dict[str, Any] = {}
        for setting in self.set:
            if not setting.startswith(f"{name}."):
                continue
            field, text = setting.removeprefix(f"{name}.").split("=", 1)
            values[field] = text if name == "env" else setting_value(text)
        return values

    def with_settings(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments with those that option ``set`` has for the object of that name.

        Dots in the name of a setting lead into nested arguments.
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
        """Return every facet with its value, including options at their default."""
        values: dict[str, OptionValue | int] = {}
        for name in FACETS:
            if name in OPTIONS:
                values[name] = self.option(name)
            else:
                values[name] = getattr(self, name)
        return values

    def own_facets(self) -> dict[str, OptionValue | int]:
        """Return the facets in which the cell differs from the defaults.

        Strategy, precision and world size are always among them.
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

    These are all listed values, and those of ``tokens`` that fit an option's pattern.
    """
    options: dict[str, tuple[str, OptionValue]] = {}
    for option in OPTIONS.values():
        for value in option.values:
            options[option.token(value)] = (option.name, value)
    for option in OPTIONS.values():
        for token in tokens:
            text = token.removeprefix(f"{option.name}_")
            if option.accepts(text):
                options[option.token(text)] = (option.name, text)
    return options


def setting_value(text: str) -> Any:
    """Return the value of a setting.

    It is JSON, a list in parentheses, the object of an import path, or the text itself.
    """
    # A hyphen is spelled as a tilde.
    text = text.replace("~", "-")
    if text.startswith("("):
        values = []
        for part in text[1:-1].split(","):
            if part:
                values.append(setting_value(part))
        return values
    with contextlib.suppress(ValueError):
        return json.loads(text)
    if re.fullmatch(r"[a-z_]\w*(\.\w+)+", text):
        with contextlib.suppress(ImportError, AttributeError, ValueError):
            return pkgutil.resolve_name(text)
    return text


@dataclass(frozen=True)
class Matrix:
    """Cells that a suite covers: strategies x precisions x world sizes x sets of options.

    Without ``strategies`` or ``precisions``, all known ones are meant; without ``world_sizes``, the
    world size of this session (``--distcompat-world-size``). ``extra`` adds single cells, or other
    matrices, beside the product. ``nodes`` is over how many machines the ranks of each cell are
    spread; without it the session says.
    """

    strategies: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    world_sizes: tuple[int, ...] = ()
    options: tuple[Mapping[str, OptionValue], ...] = ({},)
    extra: tuple[Cell | Matrix, ...] = ()
    nodes: int | None = None

    def __post_init__(self) -> None:
        for name in ("strategies", "precisions", "world_sizes", "options", "extra"):
            value = getattr(self, name)
            if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
                raise TypeError(f"Matrix({name}=...) takes a tuple, got {value!r}")
            object.__setattr__(self, name, tuple(value))
        for world_size in self.world_sizes:
            check_count("Matrix(world_sizes=...)", world_size)
        if self.nodes is not None:
            check_count("Matrix(nodes=...)", self.nodes)
        if not self.options:
            # An empty product would have no cells; a matrix without sets of options means cells
            # without options.
            object.__setattr__(self, "options", ({},))
        for options in self.options:
            for name, value in options.items():
                check_option(name, value)

    def counts_of_session(self) -> set[str]:
        """Return the counts that the session sets for all cells.

        These are the ones that the matrix does not name: ``world_size``, ``nodes``.
        """
        counts: set[str] = set()
        if not self.world_sizes:
            counts.add("world_size")
        if not self.nodes:
            counts.add("nodes")
        return counts

    def spread_as(self, other: Matrix) -> Matrix:
        """Return the same matrix over as many machines as the other one.

        A matrix that names a number of machines itself keeps it.
        """
        return self if self.nodes else dataclasses.replace(self, nodes=other.nodes)

    def cells(
        self, strategies: Iterable[str], precisions: Iterable[str], world_size: int
    ) -> Iterator[Cell]:
        """Yield the cells, each once, in a fixed order.

        The arguments stand in for what the matrix does not name.
        """
        strategies = tuple(strategies)
        precisions = tuple(precisions)
        product = itertools.product(
            self.strategies or strategies,
            self.precisions or precisions,
            self.world_sizes or (world_size,),
            self.options,
        )
        cells: list[Cell] = []
        for strategy, precision, size, options in product:
            cell = Cell(strategy, precision, size, tuple(options.items()))
            cells.append(cell.spread_as(self))
        for extra in self.extra:
            if isinstance(extra, Cell):
                cells.append(extra.spread_as(self))
            else:
                cells.extend(extra.spread_as(self).cells(strategies, precisions, world_size))
        yield from dict.fromkeys(cells)
