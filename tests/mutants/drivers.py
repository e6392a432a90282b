"""Trainers that some bugs need: with a model that the built-in drivers do not have, or with a user's mistake."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver
from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.drivers.trainer import TrainerDriver
from pytest_distcompat.ext.upstream.drivers import _rows
from pytest_distcompat.ext.upstream.models import architecture
from pytest_distcompat.trace import Loader

if TYPE_CHECKING:
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.models import Batch
    from pytest_distcompat.world import World


class Quantized(AccelerateDriver):
    """One layer writes its quantisation beside its weight, as bitsandbytes' Linear4bit does, until the weight is sharded.

    https://github.com/bitsandbytes-foundation/bitsandbytes/blob/main/bitsandbytes/nn/modules.py
    """

    def build_model(self) -> Module:
        """With one more entry in its state dict."""
        import torch

        model = super().build_model()
        layer: Any = model.get_submodule("model.layers.0.mlp.down_proj")
        layer.weight.quant_state = torch.ones(4)
        layer.register_state_dict_post_hook(_with_quantization)
        return model


def _with_quantization(layer: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    quantization = getattr(layer.weight, "quant_state", None)
    if quantization is not None:
        state[f"{prefix}weight.absmax"] = quantization


class FewRows(AccelerateDriver):
    """One more loader: it fills no batches up, and of one row it has none for rank 1.

    https://github.com/huggingface/accelerate/pull/3659
    """

    one_row: ClassVar[str] = "one row, even_batches=False"
    loaders: ClassVar[Mapping[str, Loader]] = {
        **AccelerateDriver.loaders,
        one_row: Loader(shuffled=False, filled=False, resumes=False, moves=False, rows=1),
    }

    @classmethod
    def loaders_in(cls, cell: Cell) -> Mapping[str, Loader]:
        """Return those of the built-in driver and the one more."""
        return {**super().loaders_in(cell), cls.one_row: cls.loaders[cls.one_row]}

    def rows(self, loader: str, count: int, *more: Any) -> _rows.Batches:
        """Read two epochs of it."""
        if loader != self.one_row:
            yield from super().rows(loader, count, *more)
            return
        from accelerate import Accelerator, DataLoaderConfiguration
        from torch.utils.data import DataLoader

        rows: Any = range(count)
        configuration = DataLoaderConfiguration(even_batches=False)
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        prepared = accelerator.prepare(DataLoader(rows, batch_size=2))
        for epoch in range(2):
            for batch in prepared:
                yield epoch, batch.tolist()


class PartlyCompiled(AccelerateDriver):
    """One block is compiled, not the model: https://github.com/huggingface/accelerate/pull/3881."""

    def build(self, model: Module) -> None:
        """Compile the first block in its own module, and take the wrappers off, as for an export."""
        import torch

        layers: Any = model.get_submodule("model.layers")
        layers[0] = torch.compile(layers[0], backend="eager")
        super().build(model)
        self.accelerator.unwrap_model(self.model)


class MeshOfShards(AccelerateDriver):
    """ZeRO beside a mesh without tensor parallelism: https://github.com/huggingface/accelerate/pull/3687."""

    def _with_objects(self, settings: dict[str, Any]) -> dict[str, Any]:
        from accelerate import ParallelismConfig

        config = ParallelismConfig(dp_shard_size=self.world.size)
        return {**super()._with_objects(settings), "parallelism_config": config}


class Numbered(DeepSpeedDriver):
    """Blocks have a number in their attribute ``id``: https://github.com/deepspeedai/DeepSpeed/issues/6772."""

    def build_model(self) -> Module:
        """Divide what a block returns by its number."""
        model = super().build_model()
        blocks: list[Any] = self.wrap_spec.block_modules(model)
        for number, block in enumerate(blocks, start=1):
            block.id = number
            block.register_forward_hook(lambda block, _inputs, output: output / block.id)
        return model


class SecondModel(DeepSpeedDriver):
    """A second model is made after ``zero.Init``: https://github.com/deepspeedai/DeepSpeed/pull/7566.

    Its class has no ``__init__`` of its own, and a parent that is no module has one.
    """

    def build(self, model: Module) -> None:
        """Make it, and compute a loss by it."""
        import deepspeed

        super().build(model)
        second = architecture("hf:Qwen3ForTokenClassification")
        made = second.make()
        # transformers sets the row of the padding token to zero, which not each rank has of a partitioned embedding.
        with deepspeed.zero.Init():
            _with_config(made, pad_token_id=None)
        second.loss(_with_config(made, pad_token_id=None), second.batch(0, 0))


class Attached(DeepSpeedDriver):
    """A module is attached to the model that an engine has already: https://github.com/deepspeedai/DeepSpeed/pull/8009."""

    def build(self, model: Module) -> None:
        """Attach one without parameters, as those are that measure."""
        from torch import nn

        super().build(model)
        model.add_module("attached", nn.Identity())


class NodesOfOneRank(DeepSpeedDriver):
    """Each rank is the first of its node: https://github.com/deepspeedai/DeepSpeed/pull/7601."""

    def __init__(self, cell: Cell, world: World) -> None:
        super().__init__(cell, world)
        os.environ["LOCAL_RANK"] = "0"


class WithImages(DeepSpeedDriver):
    """The Llama is the part of a model that images could be given to: https://github.com/deepspeedai/DeepSpeed/pull/7990.

    The numbers of its heads and layers are in a config within the model's config.
    """

    def __init__(self, cell: Cell, world: World) -> None:
        super().__init__(cell, world)
        self.tiny = dataclasses.replace(self.tiny, make=functools.partial(_with_images, self.tiny.make))


def _with_images(make_llama: Callable[[], Any]) -> Module:
    """Return a model of texts and images around the config of a Llama."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    images = CLIPVisionConfig(**small, image_size=8, patch_size=4)
    config = LlavaConfig(vision_config=images, text_config=make_llama().config, image_token_id=1)
    model: Any = LlavaForConditionalGeneration(config)
    return model.float()  # type: ignore[no-any-return]


class MixedAutocast(DeepSpeedDriver):
    """Autocast of a model in two dtypes, as LoRA makes one: https://github.com/deepspeedai/DeepSpeed/pull/8113."""

    def build_model(self) -> Module:
        """Train the MLP of each block alone, in float32."""
        model = super().build_model().requires_grad_(requires_grad=False)
        blocks: list[Any] = self.wrap_spec.block_modules(model)
        for block in blocks:
            block.mlp.float().requires_grad_()
        return model

    def _config(self) -> dict[str, Any]:
        autocast = {"enabled": True, "dtype": "bfloat16"}
        return {**super()._config(), "bf16": {"enabled": False}, "torch_autocast": autocast}


class SharedBatch(TrainerDriver):
    """Ranks of tensor parallelism hold experts of their own and sum what these make of the batch that they share."""

    def __init__(self, cell: Cell, world: World) -> None:
        super().__init__(cell, world)
        self.tiny = architecture("hf:gpt_oss")
        self.blocks = ("GptOssDecoderLayer",)

    def load_in_parts(self, kind: Any, directory: str) -> Any:
        """Spread the experts over the ranks of tensor parallelism."""
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(tp_size=self.cell.tp, ep_size=self.cell.tp, ep_implementation="all_reduce")
        return kind.from_pretrained(directory, distributed_config=config, experts_implementation="batched_mm")


class ScalesLosses(TrainerDriver):
    """Losses are scaled on CPU ranks too, for which accelerate makes no scaler."""

    def make_trainer(self, **settings: Any) -> Any:
        """Give accelerate a scaler before it prepares the optimizer."""
        import torch

        trainer = super().make_trainer(**settings)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
        return trainer


class WithTokenizer(TrainerDriver):
    """The collator alone has the tokenizer, and users load it from where the model is saved."""

    def make_trainer(self, **settings: Any) -> Any:
        """Pad rows by a tokenizer; they have one length, so that it adds nothing."""
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast

        words = WordLevel({"pad": 0, "unknown": 1}, unk_token="unknown")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="pad")
        return super().make_trainer(**settings | {"data_collator": DataCollatorWithPadding(tokenizer)})

    def reload(self, directory: Path) -> Module:
        """Load the tokenizer, then the model."""
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(directory)
        return super().reload(directory)


class Experts(DeepSpeedDriver):
    """The last layer is a mixture of one expert a rank: https://github.com/deepspeedai/DeepSpeed/issues/5794."""

    keywords: ClassVar[dict[str, Any]] = {"drop_tokens": False}

    def build_model(self) -> Module:
        """Put the mixture in the place of Llama's last MLP."""
        from deepspeed.moe.layer import MoE
        from torch import nn

        model: Any = super().build_model()
        width, ranks = model.config.hidden_size, self.world.size
        mixture = MoE(width, nn.Linear(width, width), ranks, ranks, use_rts=False, **self.keywords)
        # A layer of Llama wants the output alone, not the router's loss.
        mixture.register_forward_hook(lambda _mixture, _inputs, output: output[0])
        model.get_submodule("model.layers.1").mlp = mixture
        return model  # type: ignore[no-any-return]


class UnevenTokens(Experts):
    """Rank 1 has half as many tokens, so less room at each expert: https://github.com/deepspeedai/DeepSpeed/issues/6809."""

    keywords: ClassVar[dict[str, Any]] = {"drop_tokens": True, "min_capacity": 1}

    def batch_of(self, index: int, rank: int) -> Batch:
        """Leave rows out."""
        return {name: value[: 2 - rank] for name, value in super().batch_of(index, rank).items()}


class _OneGroup:
    """Model parallelism as DeepSpeed asks for it: all ranks are one tensor-parallel group."""

    def __init__(self) -> None:
        from torch import distributed

        self.rank, self.size, self.group = distributed.get_rank(), distributed.get_world_size(), distributed.group.WORLD
        self.alone = [distributed.new_group([rank]) for rank in range(self.size)][self.rank]

    def __getattr__(self, name: str) -> Any:
        """Return the method of that name: ``get_data_parallel_group``, ``get_tensor_model_parallel_rank``."""
        kind = name.rpartition("_")[2]
        parallel_values = {"rank": self.rank, "size": self.size, "group": self.group}
        single = {"rank": 0, "size": 1, "group": self.alone}
        parallel = name.startswith(("get_model_parallel", "get_tensor_model_parallel"))
        if not name.startswith("get_") or kind not in parallel_values or "sequence" in name or "slice" in name:
            raise AttributeError(name)
        return lambda: (parallel_values if parallel else single)[kind]


class TensorParallel(DeepSpeedDriver):
    """Ranks are tensor-parallel, with one batch: https://github.com/deepspeedai/DeepSpeed/pull/1801."""

    def build(self, model: Module) -> None:
        """Say so to DeepSpeed, and that one parameter is split: the others have no part in rank 1's norm."""
        import deepspeed

        split: Any = model.get_parameter("model.norm.weight")
        split.model_parallel = True
        initialize = deepspeed.initialize
        deepspeed.initialize = lambda **arguments: initialize(mpu=_OneGroup(), **arguments)
        try:
            super().build(model)
        finally:
            deepspeed.initialize = initialize

    def batch_of(self, index: int, rank: int) -> Batch:
        """Return the first rank's."""
        return super().batch_of(index, 0)


class CompiledStep(TorchDriver):
    """The optimizer's step is compiled, the second one lacks gradients: https://github.com/pytorch/pytorch/issues/115607."""

    #: Dynamo runs a fused step as it is.
    fused: ClassVar[bool] = False
    number: int = 0

    def build(self, model: Module) -> None:
        """Compile it."""
        import torch

        super().build(model)
        self.optimizer.step = torch.compile(self.optimizer.step, backend="eager")

    def step(self, number: int) -> float:
        """Remember which step it is."""
        self.number = number
        return super().step(number)

    def update(self) -> None:
        """Drop a part of the gradients in the second step."""
        for name in self.tiny.frozen_modules if self.number == 1 else ():
            self.raw.get_submodule(name).zero_grad()
        super().update()

    def reference(self, model: Module, number: int, ranks: int) -> float:
        """Freeze that part in the second step."""
        for name in self.tiny.frozen_modules:
            model.get_submodule(name).requires_grad_(number != 1)
        return super().reference(model, number, ranks)


class IntegerWeight(TorchDriver):
    """A block has a frozen weight of integers, as quantized layers do, which is only kept."""

    def build_model(self) -> Module:
        """Give it one."""
        import torch

        model = super().build_model()
        table = torch.nn.Parameter(torch.arange(8), requires_grad=False)
        model.get_submodule("blocks.0").register_parameter("table", table)
        return model


class ShardedInGroups(TorchDriver):
    """FSDP1 shards over the ranks of a group. Gradients are averaged over groups by hand, and one group saves."""

    #: The ranks of all groups that hold the same shards.
    replicas: Any = None
    #: The ranks that hold the shards of one replica.
    shards: Any = None

    def _wrap(self, model: Module, device: Any) -> Module:
        """Shard over half of the ranks."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
        self.replicas = mesh["replicate"].get_group()
        self.shards = mesh["shard"].get_group()
        blocks = {type(block) for block in self.wrap_spec.block_modules(model)}
        self.wrapped = FullyShardedDataParallel(
            model,
            process_group=self.shards,
            auto_wrap_policy=ModuleWrapPolicy(blocks),
            use_orig_params=True,
            device_id=device,
        )
        return self.wrapped  # type: ignore[no-any-return]

    def update(self) -> None:
        """Average gradients over groups before they are clipped."""
        from torch import distributed

        for parameter in self.model.parameters():
            if parameter.grad is not None and parameter.grad.numel():
                distributed.all_reduce(parameter.grad, group=self.replicas)
                parameter.grad.div_(2)
        super().update()

    def save(self, directory: Path) -> None:
        """Write the shards of the first group."""
        from torch import distributed
        from torch.distributed.checkpoint.state_dict_saver import save

        self.save_random(directory)
        if distributed.get_rank(self.replicas) == 0:
            save(self._state(), checkpoint_id=directory, process_group=self.shards)


class FilesOfRanks(TorchDriver):
    """Each rank saves its shards by ``torch.save`` to a file of its own, and loads them again."""

    def save(self, directory: Path) -> None:
        """Write DTensors as they are."""
        import torch

        self.save_random(directory)
        torch.save(self._state(), directory / f"shards_{self.world.rank}.pt")

    def _read_shards(self, directory: Path) -> dict[str, Any]:
        """Read them as torch does by default: nothing but what is known to be safe."""
        import torch

        path = directory / f"shards_{self.world.rank}.pt"
        return torch.load(path, weights_only=True)  # type: ignore[no-any-return]


class Merged(TorchDriver):
    """An adapter, also of the embeddings, is merged and taken out again before training.

    https://github.com/huggingface/peft/pull/3396
    """

    def build_model(self) -> Module:
        """Adapt a projection too."""
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"])
        model: Any = super().build_model()
        return get_peft_model(model, config, autocast_adapter_dtype=False)  # type: ignore[no-any-return]

    def build(self, model: Module) -> None:
        """Merge what adds zero: the second factor of an adapter begins so."""
        super().build(model)
        adapted: Any = self.raw
        adapted.merge_adapter()
        adapted.unmerge_adapter()


class Prefixed(TorchDriver):
    """Keys and values before those of the tokens are trained: https://github.com/huggingface/peft/pull/2883."""

    def __init__(self, cell: Cell, world: World) -> None:
        super().__init__(cell, world)
        self.tiny = dataclasses.replace(architecture("hf:qwen3"), make=_with_wide_heads)

    def build_model(self) -> Module:
        """Let PEFT make them."""
        from peft import PrefixTuningConfig, get_peft_model

        model: Any = super().build_model()
        config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        return get_peft_model(model, config)  # type: ignore[no-any-return]


def _with_wide_heads() -> Module:
    """Return a model whose heads together are wider than its hidden states."""
    model: Any = architecture("hf:qwen3").make()
    head_dim = 2 * model.config.hidden_size // model.config.num_attention_heads
    return _with_config(model, head_dim=head_dim)


def _with_config(model: Any, **values: Any) -> Module:
    """Return another model of the class, whose config has other values."""
    config = copy.deepcopy(model.config)
    for name, value in values.items():
        setattr(config, name, value)
    return type(model)(config)  # type: ignore[no-any-return]


class Prompted(TorchDriver):
    """Embeddings before those of the tokens are trained: https://github.com/huggingface/peft/pull/3109."""

    def __init__(self, cell: Cell, world: World) -> None:
        super().__init__(cell, world)
        self.tiny = architecture("hf:mpt")

    def build_model(self) -> Module:
        """Let PEFT make them. It finds no number of heads in this config, which it does not need either."""
        from peft import PromptTuningConfig, get_peft_model

        model: Any = super().build_model()
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, num_attention_heads=4)
        return get_peft_model(model, config)  # type: ignore[no-any-return]


class PromptedClassifier(TorchDriver):
    """A classifier of rows learns beside prompts: https://github.com/huggingface/peft/pull/2646."""

    def __init__(self, cell: Cell, world: World) -> None:
        super().__init__(cell, world)
        self.tiny = architecture("hf:Qwen3ForSequenceClassification")

    def build_model(self) -> Module:
        """Let PEFT add the prompts, which by its documentation trains the classifier too."""
        from peft import PromptTuningConfig, get_peft_model

        config = PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3)
        return get_peft_model(super().build_model(), config)  # type: ignore[no-any-return]

    def reference(self, model: Module, number: int, ranks: int) -> float:
        """Train the classifier in any case."""
        for name, parameter in model.named_parameters():
            if "score" in name and "original_module" not in name:
                parameter.requires_grad_()
        return super().reference(model, number, ranks)


class MethodAsText(DeepSpeedDriver):
    """The adapter's configuration names its method by a text: https://github.com/huggingface/peft/issues/2634."""

    def build_model(self) -> Module:
        """Have the adapter say so, as the configuration of a user's own method may."""
        adapted: Any = super().build_model()
        config = adapted.active_peft_config
        config.peft_type = config.peft_type.value
        return adapted  # type: ignore[no-any-return]


class AddedTwice(TorchDriver):
    """An adapter is added, unless PEFT says that it is there: https://github.com/huggingface/peft/pull/3559."""

    def build_model(self) -> Module:
        """Adapt the model once."""
        return _adapted(super().build_model())

    def build(self, model: Module) -> None:
        """Add it again, as a cell of a notebook that is run twice does."""
        from peft import LoraConfig

        adapted: Any = model
        with contextlib.suppress(ValueError):
            adapted.add_adapter("default", LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
        super().build(model)


def _adapted(model: Any) -> Module:
    """Return a model with a LoRA adapter of one projection."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj"])
    return get_peft_model(model, config, autocast_adapter_dtype=False)  # type: ignore[no-any-return]


class SeveralTasks(TrainerDriver):
    """A model whose adapters Poly mixes for each task is evaluated: https://github.com/huggingface/peft/pull/2702."""

    def metrics(self, count: int) -> Mapping[str, float]:
        """Add the loss over rows of two tasks."""
        return {**super().metrics(count), "two tasks: loss": _loss_of_two_tasks(self.build_model())}


def _loss_of_two_tasks(model: Any) -> float:
    """Return the loss that Trainer computes over rows of task 0 and task 1 in turn."""
    import torch
    from peft import PolyConfig, get_peft_model
    from transformers import PrinterCallback, Trainer, TrainingArguments

    rows = []
    for number in range(4):
        tokens = torch.arange(number, number + 8)
        rows.append({"input_ids": tokens, "labels": tokens, "task_ids": number % 2})
    config = PolyConfig(task_type="CAUSAL_LM", r=2, n_tasks=2, n_skills=2, n_splits=1, target_modules=["q_proj"])
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            per_device_eval_batch_size=2,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model=get_peft_model(model, config), args=arguments, eval_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        return float(trainer.evaluate()["eval_loss"])


class NeverCleared(TorchDriver):
    """Gradients are never cleared: https://stackoverflow.com/questions/60335387."""

    def build(self, model: Module) -> None:
        """Take the method away."""
        super().build(model)
        self.optimizer.zero_grad = lambda: None


class NormsOnly(TorchDriver):
    """All but the norms is frozen by mistake: https://discuss.pytorch.org/t/84911."""

    def build(self, model: Module) -> None:
        """Freeze it."""
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        super().build(model)


class Moved(TorchDriver):
    """A model that DDP has wrapped is converted, and loses DDP's hooks: https://github.com/pytorch/pytorch/issues/104336."""

    def build(self, model: Module) -> None:
        """Go to another dtype and back, as the issue does between devices."""
        super().build(model)
        model.double().float()


class Unwrapped(TorchDriver):
    """The module inside DDP is called, not DDP: https://x.com/jxmnop/status/1778520637193240892."""

    def build(self, model: Module) -> None:
        """Compute losses by it."""
        super().build(model)
        loss = self.tiny.loss
        self.tiny = dataclasses.replace(self.tiny, loss=lambda _wrapped, batch: loss(model, batch))


class NeverFrozen(TorchDriver):
    """What is to be frozen is not when the model is wrapped: https://github.com/open-mmlab/mmpretrain/issues/702."""

    def build(self, model: Module) -> None:
        """Train all of it."""
        super().build(model.requires_grad_())


class OtherParameters(DeepSpeedDriver):
    """The optimizer has other parameters than the model: https://github.com/deepspeedai/DeepSpeed/issues/6770."""

    def make_optimizer(self, model: Module) -> Any:
        """Return one of a copy."""
        return super().make_optimizer(copy.deepcopy(model))
