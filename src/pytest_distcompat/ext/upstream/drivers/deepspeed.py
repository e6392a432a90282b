"""Driver for DeepSpeed's own API: ``deepspeed.initialize``, the engine's forward, backward, step and checkpoints.

https://deepspeed.readthedocs.io/en/latest/initialize.html,
https://deepspeed.readthedocs.io/en/latest/training.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pytest_distcompat.calls import observer
from pytest_distcompat.ext.upstream.drivers import _loaded, _options, _preload, _rows
from pytest_distcompat.ext.upstream.drivers._refused import NO_SECOND_LOAD
from pytest_distcompat.ext.upstream.drivers.tiny import DECAY, LEARNING_RATE, TinyDriver
from pytest_distcompat.ext.upstream.sweep.fields import Source
from pytest_distcompat.launch.deepspeed_cpu import without_shared_memory
from pytest_distcompat.live_calls import Calls
from pytest_distcompat.parallel import context_parallel, expert_parallel
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import ExtraState, Loader

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.driver import OnAction, Plan
    from pytest_distcompat.models import Batch


_WHOLE_PARAMETERS = {
    "gather*": "it keeps whole parameters",
    "accessors(of='grad')": "gradients are there before step() alone",
}
_WITHOUT_ZERO = dict.fromkeys(("gather*", "accessors*"), "it is an interface of ZeRO")


_SCRIPT = """
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    optimizer, scheduler = optimizer_of(model)
    zero = {"stage": STAGE, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": MAX_NORM, "zero_optimization": zero}
    parts = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    return trainer_of(parts[0], parts[1], parts[3], strategy=SimpleNamespace(shards=STAGE == 3))
"""


class DeepSpeedCalls(Calls):
    """Calls of a DeepSpeed engine, which clips and zeroes gradients itself."""

    script: ClassVar[Mapping[str, str]] = {
        f"zero{stage}": _SCRIPT.replace("STAGE", str(stage)) for stage in range(4)
    }
    refused: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "*": {
            **dict.fromkeys(
                ("step(clip*", "step(zero*"),
                "the engine clips as its JSON says, and zeroes gradients in step()",
            ),
            **dict.fromkeys(
                ("freeze*", "unfreeze*", "add_group*"),
                "the engine partitions what it was built with",
            ),
            "load(*load_module_only=*": "load_weights does that",
            **dict.fromkeys(
                ("save(*save_latest=False*", "save(*exclude_frozen_parameters=True*"),
                "leaves out what load needs",
            ),
        },
        "zero0": _WITHOUT_ZERO,
        **{f"zero{stage}": _WHOLE_PARAMETERS for stage in (1, 2)},
        "zero3": NO_SECOND_LOAD,
    }
    passes_on: ClassVar[Mapping[str, str]] = {
        name: f"deepspeed.runtime.engine:DeepSpeedEngine.{method}"
        for name, method in {
            "export": "save_16bit_model",
            "load": "load_checkpoint",
            "load_weights": "load_checkpoint",
            "module_state_dict": "module_state_dict",
            "save": "save_checkpoint",
        }.items()
    }

    def backward(self, last: bool) -> float:
        """Run forward and backward; the boundary says whether the engine reduces and steps."""
        self.model.set_gradient_accumulation_boundary(last)
        loss = self.trainer.loss(self.model, self.position, self.ranks[0])
        self.model.backward(loss)
        self.position += 1
        return float(loss.detach())

    def micro(self) -> float:
        """Add the gradients of a batch up; ``step`` does nothing where no accumulation ends."""
        loss = super().micro()
        self.model.step()
        return loss

    def update(self, clip: str, zero: str) -> None:  # noqa: ARG002 - see ``refused``
        """Step; the engine clips, steps the scheduler and zeroes gradients."""
        self.model.step()
        self.trainer.grad_norm = self.model.get_global_grad_norm()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients: by the optimizer, or by the engine."""
        if set_to_none:
            self.model.optimizer.zero_grad()
        else:
            self.model.zero_grad()

    def outputs(self, context: str = "no_grad") -> Any:
        """Return what the model computes in evaluation mode."""
        outputs = super().outputs(context)
        self.trainer.forget_activations()
        return outputs

    @observer
    def save(self, **more: Any) -> None:
        """Save by ``save_checkpoint``."""
        self.model.save_checkpoint(str(self.directory), **more)

    def load(self, optimizer: bool = True, scheduler: bool = True, **more: Any) -> None:
        """Load by ``load_checkpoint``."""
        self.model.load_checkpoint(
            str(self.directory),
            load_optimizer_states=optimizer,
            load_lr_scheduler_states=scheduler,
            **more,
        )

    def load_weights(self, **more: Any) -> None:
        """Load the weights alone, by an argument of ``load_checkpoint``."""
        self.model.load_checkpoint(str(self.directory), load_module_only=True, **more)

    @observer
    def gather(self) -> Any:
        """Look at whole parameters by ``GatheredParameters``."""
        import deepspeed

        parameters = dict(self.model.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            return {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @observer
    def accessors(self, of: Literal["fp32_param", "optimizer_state", "grad"] = "fp32_param") -> Any:
        """Read by ``safe_get_full_fp32_param`` and its like."""
        from deepspeed import utils

        read = getattr(utils, f"safe_get_full_{of}")
        arguments = ["exp_avg"] if of == "optimizer_state" else []
        values: dict[str, Any] = {}
        for name, parameter in self.model.module.named_parameters():
            if parameter.requires_grad:
                values[name] = read(parameter, *arguments)
        return values

    @observer
    def module_state_dict(self, exclude_frozen_parameters: bool = False, **more: Any) -> Any:
        """Take the module's state dict, which ZeRO-3 has shards of."""
        state = self.model.module_state_dict(
            exclude_frozen_parameters=exclude_frozen_parameters, **more
        )
        if self.trainer.strategy.shards:
            return None
        return state

    @observer
    def export(self, exclude_frozen_parameters: bool = False, **more: Any) -> Any:
        """Write the weights by ``save_16bit_model``."""
        self.model.save_16bit_model(
            str(self.exports), exclude_frozen_parameters=exclude_frozen_parameters, **more
        )
        return self.written("pytorch_model.bin")

    @observer
    def memory(self) -> None:
        """Print how much memory is used."""
        from deepspeed.runtime.utils import see_memory_usage

        see_memory_usage("walk", force=True)


class DeepSpeedDriver(TinyDriver):
    """Training loop as in DeepSpeed's documentation."""

    name: ClassVar[str] = "deepspeed"
    preload: ClassVar[tuple[str, ...]] = _preload.DEEPSPEED
    options: ClassVar[tuple[str, ...]] = (
        *_options.OF_ALL,
        "ep",
        "meta_init",
        "loaded",
        "param_groups",
        "grad_accum_dtype",
        "conflict",
    )
    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "ds_config",
            "deepspeed.runtime.config.DeepSpeedConfig",
            ("zero1", "zero2", "zero3"),
            "keys",
        ),
        Source("initialize", "deepspeed.initialize", ("zero2", "zero3")),
        Source("save_checkpoint", "deepspeed.DeepSpeedEngine.save_checkpoint", ("zero2", "zero3")),
        Source("load_checkpoint", "deepspeed.DeepSpeedEngine.load_checkpoint", ("zero2", "zero3")),
        Source("checkpoint", "torch.utils.checkpoint.checkpoint", ("zero2", "zero3")),
        Source("AdamW", "torch.optim.AdamW", ("zero2", "zero3")),
        Source("zero_init", "deepspeed.zero.Init", ("zero3",)),
        *_loaded.sources("zero3"),
    )
    libraries: ClassVar[tuple[str, ...]] = ("deepspeed", "torch")
    #: By way of a universal checkpoint.
    reshards: ClassVar[tuple[str, ...]] = ("zero1", "zero2", "zero3")
    order: ClassVar[int] = 2
    live_calls: ClassVar[type[Calls]] = DeepSpeedCalls
    #: The engine's counters, by which it accumulates, schedules and logs.
    extra_state: ClassVar[Mapping[str, ExtraState]] = {
        "model.global_steps": ExtraState(),
        "model.global_samples": ExtraState(),
    }
    loaders: ClassVar[Mapping[str, Loader]] = _rows.DEEPSPEED
    update_flat: ClassVar[tuple[str, ...]] = ("adamw", "sgd", "muon")
    compile_themselves: ClassVar[tuple[str, ...]] = ("adam8bit", "muon")

    #: The directory of the universal checkpoint, if one of another world size is loaded.
    universal: Path | None = None
    #: What tells transformers to make models in parts under ZeRO-3, if it makes one.
    loading_config: Any = None

    @classmethod
    def unsupported_reason(cls, cell: Cell, device: str = "cpu") -> str | None:
        """Return why the cell cannot run: the strategy is torch's, or the JSON cannot express an option."""
        if STRATEGIES.get(cell.strategy).deepspeed is None:
            return f"native DeepSpeed is driven for ZeRO; {cell.strategy} is a strategy of torch"
        if cell.precision == "fp8" and cell.option("fp8_backend") == "te":
            return "Transformer Engine is driven through accelerate"
        if cell.option("optimizer") == "muon":
            reason = _no_muon(cell)
            if reason is not None:
                return reason
        if cell.option("conflict") and PRECISIONS.get(cell.precision).compute != "bfloat16":
            return "the conflict is between float16 in the JSON and a precision in bfloat16"
        return super().unsupported_reason(cell, device)

    def train(self, model: Module, plan: Plan, report: OnAction) -> None:
        """Do the plan; a checkpoint of another world size is converted, as the engine must know when it is created."""
        saved_sizes = None if self.world.own_disks else saved_on(plan.load_from)
        own_sizes = (self.world.size, self.cell.tp)
        if "load" in plan.actions and saved_sizes not in {None, own_sizes}:
            self.universal = plan.save_to.parent / "universal"
        super().train(model, plan, report)

    def build(self, model: Module) -> None:
        """Create the engine around the model, with torch's AdamW and the scheduler."""
        import deepspeed

        assert self.strategy.deepspeed is not None
        without_shared_memory()
        deepspeed.init_distributed(dist_backend=self.world.backend)
        config = dict(self.strategy.deepspeed(self.precision, self.cell))
        if self.universal is not None:
            config["checkpoint"] = {"load_universal": True}
        if self.cell.option("optimizer") == "muon":
            self.compile_nothing()
            config["optimizer"] = self._named("optimizer")
            # Each rank orthogonalizes whole matrices: with reduce_scatter the engine refuses.
            config["zero_optimization"] = {**config["zero_optimization"], "reduce_scatter": False}
        if self.cell.option("loaded").startswith("from"):  # type: ignore[union-attr]
            from transformers.integrations import HfDeepSpeedConfig

            # While it lives, transformers makes models in parts:
            # https://huggingface.co/docs/transformers/deepspeed
            self.loading_config = HfDeepSpeedConfig(config)
        self.raw = self.own_model(model, config)
        if self.precision.float8:
            self.raw = _options.in_8_bits(self.raw, self.world.device)
        self._recompute(config)
        if self.cell.option("meta_init"):
            # Parameters are partitioned one by one; the whole model need not fit into one rank's
            # memory.
            deepspeed.zero.Init(module=self.raw, config_dict_or_path=config)
        if self.cell.ep > 1:
            expert_parallel.spread_by_deepspeed(self.raw, self.cell.ep, self.world.rank)
        initialized = deepspeed.initialize(
            **self.cell.with_settings("initialize", self._arguments(config))
        )
        self.model, self.optimizer, _, self.scheduler = initialized
        mode = self.cell.option("compile")
        if mode:
            self.model.compile(backend="inductor" if mode is True else str(mode))
        self.seed_rank()

    def _recompute(self, config: Mapping[str, Any]) -> None:
        """Turn on activation checkpointing as the cell asks."""
        mode = self.cell.option("activation_checkpointing")
        blocks = self.wrap_spec.block_modules(self.raw)
        if mode == "deepspeed":
            _options.recompute_by_deepspeed(blocks, config)
        elif mode:
            _options.recompute_by_model(self.raw, blocks, self.cell)

    def evaluate(self, model: Module) -> torch.Tensor:
        """Return the logits on a batch that no step trains on, in evaluation mode."""
        outputs = super().evaluate(model)
        self.forget_activations()
        return outputs

    def forget_activations(self) -> None:
        """Have DeepSpeed discard activations for which no backward pass comes, as its documentation says of evaluations."""
        if self.cell.option("activation_checkpointing") == "deepspeed":
            import deepspeed

            deepspeed.checkpointing.reset()

    def _arguments(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of ``deepspeed.initialize``: the model, the JSON, and what the JSON does not name."""
        arguments: dict[str, Any] = {"model": self.raw, "config": config}
        if "optimizer" in config:
            arguments["model_parameters"] = self.groups(self.raw)
        else:
            arguments["optimizer"] = self.make_optimizer(self.raw)
        if "scheduler" not in config:
            # The engine makes an optimizer of the JSON itself, and calls this function with it.
            arguments["lr_scheduler"] = self.make_scheduler
            if "optimizer" in arguments:
                arguments["lr_scheduler"] = self.make_scheduler(arguments["optimizer"])
        if self.cell.cp > 1:
            from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

            rows = config["train_micro_batch_size_per_gpu"]
            arguments["mpu"] = UlyssesSPAttentionHF.register_with_transformers(
                self.raw, "sdpa", self.cell.cp, rows, disable_in_eval=True
            )
        return arguments

    def make_optimizer(self, model: Module) -> Any:
        """Return the optimizer; for the reference, that of torch which the JSON names."""
        named = self._named("optimizer")
        if not named:
            return super().make_optimizer(model)
        from torch import optim

        named["params"].pop("torch_adam", None)
        if named["type"] == "Muon":
            return self.make_muon(model, **named["params"])
        return getattr(optim, named["type"])(self.groups(model), **named["params"])

    def make_muon(self, model: Module, **settings: Any) -> torch.optim.Optimizer:
        """Return DeepSpeed's Muon for the reference, whose matrices are whole; embeddings and the last layer are AdamW's."""
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
        from torch.optim import AdamW

        self.compile_nothing()
        matrices = []
        others = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.dim() >= 2 and not re.search("embed|lm_head", name):
                matrices.append(parameter)
            else:
                others.append(parameter)
        groups: list[dict[str, Any]] = []
        if matrices:
            groups.append({"params": matrices, "use_muon": True, **settings})
        if others:
            groups.append({"params": others, "use_muon": False, **settings})
        optimizer: torch.optim.Optimizer = MuonWithAuxAdam(groups, adam_optimizer=AdamW)
        return optimizer

    def make_scheduler(self, optimizer: Any, every: int = 1) -> Any:
        """Return the scheduler; for the reference, that of DeepSpeed or torch which the JSON names."""
        named = self._named("scheduler")
        if not named:
            return super().make_scheduler(optimizer, every)
        from deepspeed.runtime import lr_schedules
        from torch.optim import lr_scheduler

        scheduler_class: Any = getattr(lr_schedules, named["type"], None)
        if scheduler_class is None:
            scheduler_class = getattr(lr_scheduler, named["type"])
        return scheduler_class(optimizer, **named["params"])

    def _named(self, part: str) -> dict[str, Any]:
        """Return what the JSON has in that part: Muon's name, and what the cell's settings put there."""
        # DeepSpeed's own Muon alone knows which matrices a flat partition has parts of. Its own
        # AdamW would be compiled.
        muon = {
            "type": "Muon",
            "params": {"lr": LEARNING_RATE, "weight_decay": DECAY, "torch_adam": True},
        }
        config: dict[str, Any] = {}
        if self.cell.option("optimizer") == "muon":
            config["optimizer"] = muon
        named: dict[str, Any] = self.cell.with_settings("ds_config", config).get(part, {})
        return named

    def groups(self, model: Module) -> Any:
        """Return what the optimizer is made of; experts are in groups of their own, which the engine demands."""
        groups = super().groups(model)
        if not self.tiny.driver:
            return groups
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        return split_params_into_different_moe_groups_for_optimizer(
            {"params": groups, "name": "all"}
        )

    def step(self, number: int) -> float:
        """Run forward and backward of each micro-batch; the engine scales, reduces, clips and steps the scheduler."""
        self.model.train()
        total = 0.0
        managed = self.cell.settings("ds_config").get("managed_gradient_accumulation", True)
        for batch, last in self.batches(number):
            if managed:
                # An epoch's last step has fewer micro-batches than the JSON says.
                self.model.set_gradient_accumulation_boundary(last)
            loss = self.micro_loss(batch)
            self.model.backward(loss / self.backward_divisor)
            total += float(loss.detach()) / self.accumulate
        self.model.step()
        norm = self.model.get_global_grad_norm()
        self.grad_norm = None if norm is None else float(norm)
        return total

    def micro_loss(self, batch: Batch) -> Any:
        """Return the loss of a micro-batch, of which Ulysses gives the ranks of a sequence parts."""
        if self.cell.cp > 1:
            return context_parallel.ulysses_loss(self.model, batch)
        return self.tiny.loss(self.model, batch)

    @property
    def backward_divisor(self) -> int:
        """Return what the loss is divided by before the backward pass, so that gradients are those of the loss."""
        # Each rank of a sequence adds the whole loss's gradients. Only ZeRO-3 divides by all ranks
        # (docs/upstream.md).
        if self.strategy.shards:
            return 1
        return self.cell.cp

    @property
    def tag(self) -> dict[str, str]:
        """Return the tag of a checkpoint on each node: DeepSpeed notes the latest one on that of rank 0 alone."""
        if not self.world.own_disks:
            return {}
        return {"tag": "saved"}

    def save(self, directory: Path) -> None:
        """Save by ``save_checkpoint``, and torch's random state, which DeepSpeed does not save."""
        settings = self.tag | self.cell.settings("save_checkpoint")
        self.model.save_checkpoint(
            str(directory), client_state={"ranks": self.world.size}, **settings
        )
        self.save_random(directory)

    def load(self, directory: Path) -> None:
        """Load by ``load_checkpoint``; one of another world size is converted to a universal checkpoint first."""
        if self.universal is not None:
            self._convert(directory, self.universal)
        settings = self.tag | self.cell.settings("load_checkpoint")
        _, client_state = self.model.load_checkpoint(str(self.universal or directory), **settings)
        ranks = client_state.get("ranks") if client_state else None
        self.load_random(directory, required=ranks == self.world.size)

    @classmethod
    def keeps_saves(cls, cell: Cell) -> bool:
        """Tell whether each checkpoint has a tag of its own, after the number of the step."""
        return not cell.own_disks and "tag" not in cell.settings("save_checkpoint")

    def load_first(self, directory: Path) -> None:
        """Load the checkpoint of the lowest step by its tag; random states are those of the last save."""
        prefix = "global_step"
        steps = [int(path.name.removeprefix(prefix)) for path in directory.glob(f"{prefix}*")]
        settings = {**self.cell.settings("load_checkpoint"), "tag": f"{prefix}{min(steps)}"}
        self.model.load_checkpoint(str(directory), **settings)

    def _convert(self, directory: Path, universal: Path) -> None:
        """Do what ``python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state`` does, on rank 0."""
        # https://www.deepspeed.ai/tutorials/universal-checkpointing/; the flag says that tensor
        # parallelism split nothing, unless the checkpoint says what it did.
        from argparse import Namespace

        from deepspeed.checkpoint.ds_to_universal import main
        from torch import distributed

        if self.world.rank == 0:
            tag = (directory / "latest").read_text(encoding="utf-8").strip()
            folders = {"input_folder": str(directory / tag), "output_folder": str(universal / tag)}
            workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
            main(Namespace(**folders, **workers, strict=True, inject_missing_state=True))
        distributed.barrier()

    def export(self, directory: Path) -> None:
        """Write the float32 masters, combined from a checkpoint by ``zero_to_fp32.py``; without ZeRO, the weights."""
        if self.cell.tp > 1:
            state = whole_weights(self.model)
        elif self.tiny.driver:
            state = self._with_all_experts(directory.parent / "shards")
        elif self.world.own_disks and self.strategy.shards:
            # The shards of a checkpoint are on all machines.
            state = whole_weights(self.model)
        elif self.world.own_disks or not self.strategy.zero_stage:
            state = self.model.module_state_dict()
        else:
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            shards = directory.parent / "shards"
            self.model.save_checkpoint(str(shards))
            state = (
                get_fp32_state_dict_from_zero_checkpoint(str(shards))
                if self.world.rank == 0
                else {}
            )
        if self.world.rank == 0:
            _options.write_whole(self.raw, state, directory)

    def _with_all_experts(self, shards: Path) -> dict[str, Any]:
        """Return the weights on rank 0 from a checkpoint with a file for each expert, which ``zero_to_fp32`` cannot read."""
        import torch

        self.model.save_checkpoint(str(shards), "export")
        if self.world.rank:
            return {}
        files = sorted((shards / "export").glob("*_model_states.pt"))
        weights: dict[str, Any] = {}
        for path in files:
            state = torch.load(path, map_location="cpu", weights_only=False)
            # The file of an expert has its weights alone.
            weights |= state.get("module", state)
        return weights

    def rows(self, _loader: str, count: int, *_: Any) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield the rows that the loader of ``training_data`` gives; on a mesh, that of the engine of the cell."""
        if self.cell.tp * self.cell.cp * self.cell.ep > 1:
            self.build(self.build_model())
            return _rows.deepspeed_engine_rows(self.model, count)
        return _rows.deepspeed_rows(count, self.world.backend)

    def trainer_world_size(self) -> int | None:
        """Return the engine's world size."""
        return int(self.model.world_size)


def _no_muon(cell: Cell) -> str | None:
    """Return why DeepSpeed's own Muon is not tried in a cell; None if it is."""
    if cell.precision != "fp32":
        return "DeepSpeed's Muon keeps momentum in the gradients' dtype, whatever else is in float32: it is tried in fp32 alone"
    others = cell.without("model", "optimizer", "set").options
    if others:
        first, _ = others[0]
        return f"DeepSpeed's Muon is not tried with option {first!r} yet"
    return None


def saved_on(directory: Path) -> tuple[int, int] | None:
    """Return how many ranks saved optimizer state, and how many of them are tensor parallel peers; None without ZeRO."""
    latest = directory / "latest"
    checkpoint = directory
    if latest.exists():
        checkpoint = directory / latest.read_text(encoding="utf-8").strip()
    ranks = len(list(checkpoint.glob("*zero_pp_rank_*_optim_states.pt")))
    if not ranks:
        return None
    tensor_parallel = len(list(checkpoint.glob("*zero_pp_rank_0_*_optim_states.pt")))
    return ranks, tensor_parallel


def whole_weights(engine: Any) -> dict[str, Any]:
    """Return the state dict of a model that tensor parallelism has cut, with whole weights on rank 0."""
    # The method is private, and accelerate and Trainer call it: ``save_16bit_model`` writes the
    # parts of rank 0 alone (docs/upstream.md). It leaves buffers out. A test of
    # ``tests/launch/test_private_names.py`` fails when it goes away.
    return {**engine.module_state_dict(), **(engine._consolidated_16bit_state_dict() or {})}  # noqa: SLF001 - see above
