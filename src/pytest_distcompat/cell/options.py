"""Options of a cell: all that varies beside strategy, precision and number of ranks.

A cell is one point of the matrix of what is tested. ``fsdp2-bf16_upcast-w4-tp_2-compile`` has two
options, ``tp`` with the value 2 and ``compile`` with True. ``OPTIONS`` lists each option with its
values. ``cell`` checks the options of each cell against it and writes them into the cell's id,
``profiles`` makes cells of all values, and drivers (the trainers under test) configure the trainer
by them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pytest_distcompat.failures import UsageProblem, hides_frames
from pytest_distcompat.installed import version_of
from pytest_distcompat.spread import COUNTS

#: pytest looks for this name: https://docs.pytest.org/en/stable/example/simple.html. With it the
#: traceback of a UsageProblem begins in the user's code.
__tracebackhide__ = hides_frames

#: The value of an option: ``True``, ``"selective"`` or ``2``.
OptionValue = bool | str | int


@dataclass(frozen=True)
class Option:
    """One further axis of a cell, such as ``tp`` or ``model``."""

    #: The name in cells, marks and expectations: ``tp``.
    name: str
    #: Its values; the first is the default, which a cell's id leaves out.
    values: tuple[OptionValue, ...]
    #: What it does, for the documentation.
    meaning: str
    #: A regular expression: texts that match it as a whole are values too. Empty for none.
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

        ``True`` equals 1, and a cell id spells the two differently: ``compile`` and ``tp_1``.
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


#: One setting of a library, ``DataLoaderConfiguration.even_batches=false``. It has no characters
#: that have a meaning around it: hyphens in a cell's id, square brackets in the name of a pytest
#: item.
_SETTING = r"\w+\.[\w.]+=[^\s+\[\]-]+"

#: Without transformers the default is what needs none, so that a first run has cells.
_FIRST_MODELS = ("llama", "llama_tied", "mlp")
if not version_of("transformers"):
    _FIRST_MODELS = ("mlp", "llama", "llama_tied")

#: Every option by its name, in the order in which a cell's id has them.
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
                "llama_calibrated",
                "llama_dropout",
                "batchnorm",
                "syncbatchnorm",
                "moe",
                "moe_fused",
                "moe_deepspeed",
                "convolutions",
                "tiled",
                "heads",
                "wide",
                "layers",
                "layers_tied",
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
            "two groups: norms and biases without weight decay, all else at half the learning rate",
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

#: All that an expectation may name to say which cells it is about: strategy, precision, the world
#: size, the number of machines, and each option.
FACETS = ("strategy", "precision", *COUNTS, *OPTIONS)


def check_option(name: str, value: OptionValue) -> None:
    """Raise UsageProblem, listing what exists, for an option or a value that does not."""
    if name not in OPTIONS:
        raise UsageProblem(f"no option named {name!r}. Known: {', '.join(OPTIONS)}")
    if not OPTIONS[name].accepts(value):
        known = ", ".join(map(repr, OPTIONS[name].values))
        raise UsageProblem(f"option {name!r} has no value {value!r}. Known: {known}")
