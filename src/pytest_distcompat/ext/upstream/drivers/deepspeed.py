"""Driver for DeepSpeed's own API: ``deepspeed.initialize``, its engine and its checkpoints.

https://deepspeed.readthedocs.io/en/latest/initialize.html,
https://deepspeed.readthedocs.io/en/latest/training.html
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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


#: Pattern of calls -> why walks have none of them under ZeRO-1 and ZeRO-2.
_WHOLE_PARAMETERS = {
    "gather*": "it keeps whole parameters",
    "accessors(of='grad')": "gradients are there before step() alone",
}
#: The same without ZeRO.
_WITHOUT_ZERO = dict.fromkeys(("gather*", "accessors*"), "it is an interface of ZeRO")


#: Code that makes the trainer in the script of a walk; ``STAGE`` stands for the stage of ZeRO.
_SCRIPT = """
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    optimizer, scheduler = optimizer_of(model)
    zero = {
        "stage": STAGE,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": MAX_NORM,
        "zero_optimization": zero,
    }
    parts = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    return trainer_of(parts[0], parts[1], parts[3], strategy=SimpleNamespace(shards=STAGE == 3))
"""


_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"


class DeepSpeedCalls(Calls):
    """Calls of a DeepSpeed engine, which clips and zeroes gradients itself."""

    script: ClassVar[Mapping[str, str]] = {
        "zero0": _SCRIPT.replace("STAGE", "0"),
        "zero1": _SCRIPT.replace("STAGE", "1"),
        "zero2": _SCRIPT.replace("STAGE", "2"),
        "zero3": _SCRIPT.replace("STAGE", "3"),
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
        "zero1": _WHOLE_PARAMETERS,
        "zero2": _WHOLE_PARAMETERS,
        "zero3": NO_SECOND_LOAD,
    }
    passes_on: ClassVar[Mapping[str, str]] = {
        "export": f"{_ENGINE}.save_16bit_model",
        "load": f"{_ENGINE}.load_checkpoint",
        "load_weights": f"{_ENGINE}.load_checkpoint",
        "module_state_dict": f"{_ENGINE}.module_state_dict",
        "save": f"{_ENGINE}.save_checkpoint",
    }

    def backward(self, last: bool) -> float:
        """Run forward and backward of the next batch and return the loss.

        Args:
            last: Whether gradient accumulation ends with it: only then does the engine step.
        """
        self.model.set_gradient_accumulation_boundary(last)
        loss = self.trainer.loss(self.model, self.position, self.ranks[0])
        self.model.backward(loss)
        self.position += 1
        return float(loss.detach())

    def micro(self) -> float:
        """Add the gradients of a batch up, without updating parameters."""
        loss = super().micro()
        # The engine wants a step() after each backward(); it updates where accumulation ends.
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
        """Return copies of the whole parameters, by ``GatheredParameters``."""
        import deepspeed

        parameters = dict(self.model.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            return {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @observer
    def accessors(self, of: Literal["fp32_param", "optimizer_state", "grad"] = "fp32_param") -> Any:
        """Read what belongs to each parameter, by ``safe_get_full_fp32_param`` and its like.

        Of the optimizer's state it is Adam's first moment.
        """
        from deepspeed import utils

        accessor = getattr(utils, f"safe_get_full_{of}")
        arguments = ["exp_avg"] if of == "optimizer_state" else []
        values: dict[str, Any] = {}
        for name, parameter in self.model.module.named_parameters():
            if parameter.requires_grad:
                values[name] = accessor(parameter, *arguments)
        return values

    @observer
    def module_state_dict(self, exclude_frozen_parameters: bool = False, **more: Any) -> Any:
        """Return the module's state dict; None under ZeRO-3, where each rank has shards of it."""
        state = self.model.module_state_dict(
            exclude_frozen_parameters=exclude_frozen_parameters, **more
        )
        if self.trainer.strategy.shards:
            return None
        return state

    @observer
    def export(self, exclude_frozen_parameters: bool = False, **more: Any) -> Any:
        """Write the weights by ``save_16bit_model``, and return them."""
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
        Source(
            "use_deterministic_algorithms", "torch.use_deterministic_algorithms", ("zero2", "zero3")
        ),
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
    #: While this ``HfDeepSpeedConfig`` lives, transformers makes models in parts under ZeRO-3:
    #: https://huggingface.co/docs/transformers/deepspeed. None where it makes no model.
    loading_config: Any = None

    @classmethod
    def _reasons(cls, cell: Cell, device: str) -> Iterator[str | None]:
        """Yield for each condition why the cell cannot run, or None; the first reason counts.

        The strategy may be torch's, or DeepSpeed's JSON may have no word for an option.
        """
        if STRATEGIES.get(cell.strategy).deepspeed is None:
            yield f"native DeepSpeed is driven for ZeRO; {cell.strategy} is a strategy of torch"
        if cell.precision == "fp8" and cell.option("fp8_backend") == "te":
            yield "Transformer Engine is driven through accelerate"
        if cell.option("optimizer") == "muon":
            yield _untried_muon_reason(cell)
        if cell.option("conflict") and PRECISIONS.get(cell.precision).compute != "bfloat16":
            yield "the conflict is between float16 in the JSON and a precision in bfloat16"
        yield from super()._reasons(cell, device)

    def train(self, model: Module, plan: Plan, report: OnAction) -> None:
        """Do the plan, and find out first whether its checkpoint must be converted.

        One of another world size is loaded as a universal checkpoint, of which the engine must know
        when it is created.
        """
        saved_sizes = None if self.world.own_disks else saved_on(plan.load_from)
        own_sizes = (self.world.size, self.cell.tp)
        if "load" in plan.actions and saved_sizes not in {None, own_sizes}:
            self.universal = plan.save_to.parent / "universal"
        super().train(model, plan, report)

    def build(self, model: Module) -> None:
        """Create the engine around the model, with its optimizer and its scheduler."""
        import deepspeed

        without_shared_memory()
        deepspeed.init_distributed(dist_backend=self.world.backend)
        config = self._config()
        if self.cell.option("optimizer") == "muon":
            self.compile_nothing()
        if self.cell.option("loaded").startswith("from"):  # type: ignore[union-attr]
            from transformers.integrations import HfDeepSpeedConfig

            self.loading_config = HfDeepSpeedConfig(config)
        self.raw = self._changed_in_place(self.own_model(model, config), config)
        arguments = self.cell.with_settings("initialize", self._arguments(config))
        self.model, self.optimizer, _, self.scheduler = deepspeed.initialize(**arguments)
        mode = self.cell.option("compile")
        if mode:
            backend = "inductor" if mode is True else str(mode)
            self.model.compile(backend=backend)
        self.seed_rank()

    def _config(self) -> dict[str, Any]:
        """Return DeepSpeed's JSON for the cell."""
        assert self.strategy.deepspeed is not None
        config = dict(self.strategy.deepspeed(self.precision, self.cell))
        if self.universal is not None:
            config["checkpoint"] = {"load_universal": True}
        if self.cell.option("optimizer") == "muon":
            config["optimizer"] = self._json_entry("optimizer")
            # Each rank orthogonalizes whole matrices: with reduce_scatter the engine refuses.
            config["zero_optimization"] = {**config["zero_optimization"], "reduce_scatter": False}
        return config

    def _changed_in_place(self, model: Module, config: dict[str, Any]) -> Module:
        """Make the changes to the model that DeepSpeed leaves to its user, and return it.

        Layers in float8, activation checkpointing, partitioned parameters, spread experts.

        Args:
            model: The model.
            config: DeepSpeed's JSON.
        """
        import deepspeed

        if self.precision.float8:
            model = _options.in_8_bits(model, self.world.device)
        self._recompute(model, config)
        if self.cell.option("meta_init"):
            # Parameters are partitioned one by one; the whole model need not fit into one rank's
            # memory.
            deepspeed.zero.Init(module=model, config_dict_or_path=config)
        if self.cell.ep > 1:
            expert_parallel.spread_by_deepspeed(model, self.cell.ep, self.world.rank)
        return model

    def _recompute(self, model: Module, config: Mapping[str, Any]) -> None:
        """Turn on activation checkpointing as the cell asks."""
        mode = self.cell.option("activation_checkpointing")
        blocks = self.wrap_spec.block_modules(model)
        if mode == "deepspeed":
            _options.recompute_by_deepspeed(blocks, config)
        elif mode:
            _options.recompute_by_model(model, blocks, self.cell)

    def evaluate(self, model: Module) -> torch.Tensor:
        """Return the logits on a batch that no step trains on, in evaluation mode."""
        outputs = super().evaluate(model)
        self.forget_activations()
        return outputs

    def forget_activations(self) -> None:
        """Have DeepSpeed discard activations for which no backward pass comes.

        Its documentation asks that of evaluations.
        """
        if self.cell.option("activation_checkpointing") == "deepspeed":
            import deepspeed

            deepspeed.checkpointing.reset()

    def _arguments(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of ``deepspeed.initialize``.

        The engine makes the optimizer and the scheduler that the JSON names. Others are passed to
        it.

        Args:
            config: DeepSpeed's JSON.
        """
        arguments: dict[str, Any] = {"model": self.raw, "config": config}
        if "optimizer" in config:
            arguments["model_parameters"] = self.groups(self.raw)
        else:
            arguments["optimizer"] = self.make_optimizer(self.raw)
        if "scheduler" not in config:
            if "optimizer" in config:
                # The engine calls this function with the optimizer that it has made.
                arguments["lr_scheduler"] = self.make_scheduler
            else:
                arguments["lr_scheduler"] = self.make_scheduler(arguments["optimizer"])
        if self.cell.cp > 1:
            from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

            rows = config["train_micro_batch_size_per_gpu"]
            arguments["mpu"] = UlyssesSPAttentionHF.register_with_transformers(
                self.raw, "sdpa", self.cell.cp, rows, disable_in_eval=True
            )
        return arguments

    def make_optimizer(self, model: Module) -> Any:
        """Return the optimizer; for the reference, the one of torch that the JSON names."""
        entry = self._json_entry("optimizer")
        if not entry:
            return super().make_optimizer(model)
        from torch import optim

        settings = entry["params"]
        # It chooses between DeepSpeed's AdamW and torch's.
        settings.pop("torch_adam", None)
        if entry["type"] == "Muon":
            return self.make_muon(model, **settings)
        optimizer_class = getattr(optim, entry["type"])
        return optimizer_class(self.groups(model), **settings)

    def make_muon(self, model: Module, **settings: Any) -> torch.optim.Optimizer:
        """Return DeepSpeed's Muon for the reference.

        Its matrices are whole there. AdamW updates vectors, embeddings and the last layer.
        """
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
        from torch.optim import AdamW

        self.compile_nothing()
        matrices = []
        others = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            embeds = re.search("embed|lm_head", name)
            if parameter.dim() >= 2 and not embeds:
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
        """Return the scheduler; for the reference, DeepSpeed's or torch's that the JSON names."""
        entry = self._json_entry("scheduler")
        if not entry:
            return super().make_scheduler(optimizer, every)
        from deepspeed.runtime import lr_schedules
        from torch.optim import lr_scheduler

        scheduler_class: Any = getattr(lr_schedules, entry["type"], None)
        if scheduler_class is None:
            scheduler_class = getattr(lr_scheduler, entry["type"])
            return scheduler_class(optimizer, **entry["params"])
        return _OneSchedule(optimizer, scheduler_class, entry["params"])

    def _json_entry(self, key: str) -> dict[str, Any]:
        """Return the ``type`` and ``params`` that a cell puts into DeepSpeed's JSON; or nothing.

        They come from the cell's settings of ``ds_config``, and from option ``optimizer`` at
        ``muon``.

        Args:
            key: ``optimizer`` or ``scheduler``.
        """
        config: dict[str, Any] = {}
        if self.cell.option("optimizer") == "muon":
            # DeepSpeed's own Muon alone knows which matrices a flat partition has parts of. Its own
            # AdamW would be compiled.
            settings = {"lr": LEARNING_RATE, "weight_decay": DECAY, "torch_adam": True}
            config["optimizer"] = {"type": "Muon", "params": settings}
        config = self.cell.with_settings("ds_config", config)
        entry: dict[str, Any] = config.get(key, {})
        return entry

    def groups(self, model: Module) -> Any:
        """Return what the optimizer is made of: parameters, or param groups.

        Experts are in groups of their own, which the engine demands.
        """
        groups = super().groups(model)
        # A model for this driver alone has DeepSpeed's layers of experts.
        if not self.tiny.driver:
            return groups
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        return split_params_into_different_moe_groups_for_optimizer(
            {"params": groups, "name": "all"}
        )

    def step(self, number: int) -> float:
        """Run forward and backward of each micro-batch, then the engine's ``step``.

        The engine scales, reduces and clips gradients, and steps optimizer and scheduler.
        """
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
        """Return the loss of a micro-batch.

        Under context parallelism Ulysses gives each rank its part of the sequence.
        """
        if self.cell.cp > 1:
            return context_parallel.ulysses_loss(self.model, batch)
        return self.tiny.loss(self.model, batch)

    @property
    def backward_divisor(self) -> int:
        """Return what the loss is divided by before the backward pass.

        So the gradients are those of the loss itself. Each rank of a sequence adds the whole loss's
        gradients, and only ZeRO-3 divides by all ranks (docs/upstream.md).
        """
        if self.strategy.shards:
            return 1
        return self.cell.cp

    @property
    def tag(self) -> dict[str, str]:
        """Return the argument that names a checkpoint, where each node has a disk of its own.

        Without it the engine looks for the name of the latest one, which DeepSpeed writes on the
        node of rank 0 alone.
        """
        if not self.world.own_disks:
            return {}
        return {"tag": "saved"}

    def save(self, directory: Path) -> None:
        """Save by ``save_checkpoint``, and torch's random state, which DeepSpeed does not save."""
        settings = self.tag | self.cell.settings("save_checkpoint")
        client_state = {"ranks": self.world.size}
        self.model.save_checkpoint(str(directory), client_state=client_state, **settings)
        self.save_random(directory)

    def load(self, directory: Path) -> None:
        """Load by ``load_checkpoint``; a checkpoint of another world size is converted first."""
        checkpoint = directory
        if self.universal is not None:
            self._convert(directory, self.universal)
            checkpoint = self.universal
        settings = self.tag | self.cell.settings("load_checkpoint")
        _, client_state = self.model.load_checkpoint(str(checkpoint), **settings)
        saved_ranks = client_state.get("ranks") if client_state else None
        self.load_random(directory, required=saved_ranks == self.world.size)

    @classmethod
    def keeps_saves(cls, cell: Cell) -> bool:
        """Tell whether each checkpoint has a tag of its own, after the number of the step."""
        return not cell.own_disks and "tag" not in cell.settings("save_checkpoint")

    def load_first(self, directory: Path) -> None:
        """Load the checkpoint of the lowest step by its tag, without random states.

        Those are saved by the driver, and are of the last save.
        """
        prefix = "global_step"
        steps = [int(path.name.removeprefix(prefix)) for path in directory.glob(f"{prefix}*")]
        settings = {**self.cell.settings("load_checkpoint"), "tag": f"{prefix}{min(steps)}"}
        self.model.load_checkpoint(str(directory), **settings)

    def _convert(self, directory: Path, universal: Path) -> None:
        """Convert a checkpoint to a universal one, on rank 0; the others wait.

        It is what ``python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state`` does:
        https://www.deepspeed.ai/tutorials/universal-checkpointing/. The flag says that tensor
        parallelism split nothing, unless the checkpoint says what it did.

        Args:
            directory: The checkpoint.
            universal: The directory of the universal one.
        """
        from argparse import Namespace

        from deepspeed.checkpoint.ds_to_universal import main
        from torch import distributed

        if self.world.rank == 0:
            tag = (directory / "latest").read_text(encoding="utf-8").strip()
            arguments = Namespace(
                input_folder=str(directory / tag),
                output_folder=str(universal / tag),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
            main(arguments)
        distributed.barrier()

    def export(self, directory: Path) -> None:
        """Write the whole weights on rank 0; under ZeRO, the float32 masters where it has them."""
        state = self._whole_state(directory.parent / "shards")
        if self.world.rank == 0:
            _options.write_whole(self.raw, state, directory)

    def _whole_state(self, shards: Path) -> dict[str, Any]:
        """Return the whole weights by name, on rank 0 at least.

        Args:
            shards: The directory for a checkpoint, where the weights are combined from one.
        """
        own_disks = self.world.own_disks
        if self.cell.tp > 1:
            return whole_weights(self.model)
        if self.tiny.driver:
            return self._with_all_experts(shards)
        if own_disks and self.strategy.shards:
            # The shards of a checkpoint are on all machines.
            return whole_weights(self.model)
        if own_disks or not self.strategy.zero_stage:
            weights: dict[str, Any] = self.model.module_state_dict()
            return weights
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        self.model.save_checkpoint(str(shards))
        if self.world.rank:
            return {}
        masters: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(str(shards))
        return masters

    def _with_all_experts(self, shards: Path) -> dict[str, Any]:
        """Return the weights of a model with DeepSpeed's experts, on rank 0; none on the others.

        They are read from a checkpoint, which has a file for each expert: ``zero_to_fp32`` cannot
        read it.

        Args:
            shards: The directory for the checkpoint.
        """
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
        """Yield the rows that the loader of ``training_data`` gives.

        On a mesh the engine of the cell makes the loader.
        """
        if self.cell.tp * self.cell.cp * self.cell.ep > 1:
            self.build(self.build_model())
            return _rows.deepspeed_engine_rows(self.model, count)
        return _rows.deepspeed_rows(count, self.world.backend)

    def trainer_world_size(self) -> int | None:
        """Return the engine's world size."""
        return int(self.model.world_size)


class _OneSchedule:
    """A schedule of DeepSpeed for the first param group, which all groups of an optimizer follow.

    The reference is made of DeepSpeed's own schedule, and must not repeat what that does wrong with
    several groups.
    """

    #: What a schedule changes, besides the learning rate where it cycles momentum.
    changed: ClassVar[tuple[str, ...]] = ("lr", "momentum", "betas")

    def __init__(
        self, optimizer: Any, scheduler_class: Callable[..., Any], settings: Mapping[str, Any]
    ) -> None:
        self._groups = optimizer.param_groups
        first_alone = copy.copy(optimizer)
        first_alone.param_groups = [dict(self._groups[0])]
        self._first = first_alone.param_groups[0]
        self._scheduler = scheduler_class(first_alone, **settings)
        self._copy_to_all()

    def step(self) -> None:
        """Step the schedule of the first group, and copy what it changed to all groups."""
        self._scheduler.step()
        self._copy_to_all()

    def _copy_to_all(self) -> None:
        for group in self._groups:
            for name in self.changed:
                if name in group:
                    group[name] = self._first[name]


def _untried_muon_reason(cell: Cell) -> str | None:
    """Return why DeepSpeed's own Muon is not tried in a cell; None if it is."""
    if cell.precision != "fp32":
        return (
            "DeepSpeed's Muon keeps momentum in the gradients' dtype, whatever else is in float32: "
            "it is tried in fp32 alone"
        )
    others = cell.without("model", "optimizer", "set").options
    if others:
        first, _ = others[0]
        return f"DeepSpeed's Muon is not tried with option {first!r} yet"
    return None


def saved_on(directory: Path) -> tuple[int, int] | None:
    """Return the number of ranks that saved a checkpoint of ZeRO; None if it is not of ZeRO.

    With it comes the size of a tensor parallel group. Each rank writes a file of optimizer state,
    whose name has the rank among data parallel ones.
    """
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
    """Return the state dict of a model in parts, with whole weights on rank 0."""
    # The method is private, and accelerate and Trainer call it: ``save_16bit_model`` writes the
    # parts of rank 0 alone (docs/upstream.md). It leaves buffers out. A test of
    # ``tests/launch/test_private_names.py`` fails when it goes away.
    state = dict(engine.module_state_dict())
    whole = engine._consolidated_16bit_state_dict()  # noqa: SLF001 - see above
    return {**state, **(whole or {})}
