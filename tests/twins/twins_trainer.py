"""Subclasses of transformers.Trainer that train something else, go on as something else, or save something else."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from pytest_distcompat.drivers.trainer import TrainerDriver

from .declare import CLIPPING, GRADIENTS, MEAN, MEMORY, PARITY, Torch, twin

if TYPE_CHECKING:
    from pathlib import Path

    from torch.nn import Module

    from pytest_distcompat.driver import Plan

#: For ``also``: what all checks say that need what came after a run broke off.
_LATE = r"raised FileNotFoundError: .*trainer_state\.json"


class Trainers(TrainerDriver):
    """The trainer driver with the methods of Trainer as more actions, to be got wrong: ``own`` are those of a subclass."""

    def own(self) -> dict[str, Any]:
        raise NotImplementedError

    def make_trainer(self, **settings: Any) -> Any:
        from transformers import Trainer

        return type("Trainer", (Trainer,), self.own())(**settings)


_STALE = r"^rank 0: 12 of 12 tensors in the optimizer are no parameters of the live model \(stale\)"
_NO_GRADIENTS = {**GRADIENTS, "dtypes": r"AdamW is given gradients in nothing; expected float32", **MEMORY}


@twin(
    "optimizer",
    "ddp-fp32-w2-model_mlp",
    match=_STALE,
    # Of an optimizer that keeps nothing at all the names say nothing: it might be SGD.
    also={**PARITY, **CLIPPING, **_NO_GRADIENTS},
)
@twin(
    "optimizer",
    "fsdp1-fp32-w2-model_mlp",
    match=_STALE,
    # It saves no state of a parameter that it does not know.
    also={**dict.fromkeys(("names", "parity", "clipping", "observers"), r"raised KeyError: tensor"), **_NO_GRADIENTS},
)
class OptimizerOfAnotherModel(Trainers):
    """The optimizer was made from what the parameters were before something replaced them; nobody notices."""

    def own(self) -> dict[str, Any]:
        from transformers import Trainer

        def create_optimizer(trainer: Any, model: Any = None) -> Any:
            return _stale(Trainer.create_optimizer(trainer, model))

        return {"create_optimizer": create_optimizer}


@twin(
    "optimizer",
    "fsdp2-fp32-w2-model_mlp",
    match=_STALE,
    also={**dict.fromkeys(("names", "parity", "clipping", "observers"), r"raised"), **_NO_GRADIENTS},
)
class OptimizerOfBeforeTheSharding(Trainers):
    """accelerate gives the shards to the optimizer that it prepares; it did not get this one."""

    def own(self) -> dict[str, Any]:
        from transformers import Trainer

        def create_scheduler(trainer: Any, num_training_steps: int, optimizer: Any = None) -> Any:
            _stale(trainer.optimizer)
            return Trainer.create_scheduler(trainer, num_training_steps, optimizer)

        return {"create_scheduler": create_scheduler}


def _stale(optimizer: Any) -> Any:
    """The twin above with tensors that no module computes with."""
    for group in optimizer.param_groups:
        group["params"] = [parameter.detach().clone().requires_grad_() for parameter in group["params"]]
    return optimizer


@twin(
    "resume",
    "ddp-fp32-w2-model_mlp",
    match=r"rank 1: the optimizer's state is empty after the load; 36 tensors were saved(?s:.*)scheduler is at",
    # The random state after an evaluation is another in the sound trainer too: known issue transformers-evaluate-rng.
    also={"midway": r"rank 1: lr of the optimizer's group 0 is [\d.]+ after step 1 of the resumed run"},
)
class OnlyTheModelComesBack(Trainers):
    """As when the file that the library wrote had another name than the one that Trainer looked for.

    https://github.com/huggingface/transformers/issues/25849
    """

    def own(self) -> dict[str, Any]:
        return {"_load_optimizer_and_scheduler": lambda trainer, checkpoint: None}


@twin(
    "resume",
    "ddp-fp32-w2-model_mlp-set_train.resume_from_checkpoint=true",
    match=r"raised RuntimeError: Trainer goes on after 0 steps; expected 3",
    also=dict.fromkeys(("data", "extra_state", "midway"), r"raised RuntimeError"),
)
class AsksForThePathAlone(Trainers):
    """``train(resume_from_checkpoint=True)`` begins anew: a path alone is looked at."""

    def own(self) -> dict[str, Any]:
        from transformers import Trainer

        def train(trainer: Any, resume_from_checkpoint: Any = None) -> Any:
            if resume_from_checkpoint is True:
                resume_from_checkpoint = None
            return Trainer.train(trainer, resume_from_checkpoint=resume_from_checkpoint)

        return {"train": train}


@twin(
    "best",
    "ddp-fp32-w2-model_mlp-set_TrainingArguments.load_best_model_at_end=true",
    "fsdp2-fp32-w2-model_mlp-state_dict_full-set_TrainingArguments.load_best_model_at_end=true",
    match=r"^rank 0: parameter '.*' and \d+ others: other values after the end of the training",
    # The evaluation before the save draws a seed: known issue transformers-evaluate-rng.
    also={"observers": r"^rank 0: the random state is another after the save"},
)
class NeverGoesBack(Trainers):
    """Ends with the weights of its last step, as where the best checkpoint was not found."""

    def own(self) -> dict[str, Any]:
        return {"_load_best_model": lambda trainer: None}


@twin(
    "export",
    "ddp-fp32-w2-model_mlp",
    match=r"^rank 0: outputs of the trained and of the reloaded model are up to",
)
class PredictsByRank(Trainers):
    """``predict`` returns the rows of rank 0 first, then those of rank 1, which got every second batch."""

    def own(self) -> dict[str, Any]:
        from transformers import Trainer

        def predict(trainer: Any, rows: Any) -> Any:
            predicted = Trainer.predict(trainer, rows)
            count = len(rows) // 4
            order = [0, 1, *range(4, 4 + 2 * (count - 1)), 2, 3]
            return predicted._replace(predictions=predicted.predictions[order])

        return {"predict": predict}


@twin(
    "parity",
    "ddp-fp32-w2-grad_accum_2",
    match=r"^step 1: the loss is 4\.\d+; 4\.\d+ in the reference .*: here each micro-batch counts alike, there each token",
    also=CLIPPING | GRADIENTS | MEAN,
)
class MeanOfMeans(Trainers):
    """Micro-batches count alike, however many tokens they have: https://github.com/huggingface/transformers/pull/34191."""

    def make_trainer(self, **settings: Any) -> Any:
        from transformers import Trainer

        trainer = Trainer(**settings)
        trainer.model_accepts_loss_kwargs = False
        return trainer


@twin(
    "parity",
    "fsdp2-fp32-w2",
    match=r"^step 1: the loss is 9\.\d+; 4\.\d+ in the reference .*: here each rank counts alike, times 2, the number of ranks",
    also=GRADIENTS | MEAN,
)
class LossTimesRanks(TrainerDriver):
    """The model takes the number of items and ignores it: https://github.com/huggingface/transformers/issues/47688."""

    def build_model(self) -> Module:
        model = super().build_model()
        forward = model.forward

        @functools.wraps(forward)
        def ignore(*args: Any, num_items_in_batch: Any = None, **named: Any) -> Any:
            return forward(*args, **named)

        model.forward = ignore
        return model


@twin(
    "parity",
    "zero2-fp32-w2",
    match=r"^step 1: the loss is 4\.\d+; 4\.\d+ in the reference .*: here each rank counts alike, there each token",
    also=GRADIENTS | MEAN,
)
class MeanOfRanks(TrainerDriver):
    """Ranks count alike, however many tokens they have: https://github.com/huggingface/transformers/issues/34242."""

    def arguments(self, plan: Plan) -> dict[str, Any]:
        return super().arguments(plan) | {"average_tokens_across_devices": False}


@twin(
    "active",
    "zero2-fp32-w2-model_mlp",
    match=r"^rank 0: the trainer believes in 1 ranks?",
    also={**PARITY, **CLIPPING, **GRADIENTS},
)
class AloneUnderDeepSpeed(TrainerDriver):
    """DeepSpeed on CPU ranks without ``use_cpu``, as transformers 5.23 has it: each rank trains on all the data."""

    def arguments(self, plan: Plan) -> dict[str, Any]:
        return super().arguments(plan) | {"use_cpu": False}


@twin(
    "save_only_model",
    "ddp-fp32-w2-model_mlp-save_only_model",
    match=r"^state of an optimizer is in 'checkpoint-3/optimizer\.pt'; .*\nstate of a scheduler is in 'checkpoint-3/sched",
)
@twin(
    "save_only_model",
    "zero2-fp32-w2-model_mlp-save_only_model",
    match=r"^state of an optimizer is in 'checkpoint-3/global_step3/.*_optim_states\.pt'",
)
class SavesItAll(TrainerDriver):
    """The argument went astray."""

    def arguments(self, plan: Plan) -> dict[str, Any]:
        return super().arguments(plan) | {"save_only_model": False}


class SavesOther(Trainers):
    """Saves something else than the model's state dict."""

    def other(self, state: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def own(self) -> dict[str, Any]:
        from transformers import Trainer

        def save(trainer: Any, output_dir: Any = None, state_dict: Any = None) -> None:
            state = trainer.model.state_dict() if state_dict is None else state_dict
            Trainer._save(trainer, output_dir, self.other(state))

        return {"_save": save}


@twin(
    "save_only_model",
    "ddp-fp32-w2-model_mlp-save_only_model",
    "zero3-fp32-w2-model_mlp-save_only_model",
    match=r"^1 of 15 weights are not saved, first 'outlet\.bias'$",
    also={"names": r"1 of 14 parameters are in no saved file, first 'outlet\.bias'"},
)
class LosesTheLast(SavesOther):
    """One weight falls off."""

    def other(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in state.items() if name != "outlet.bias"}


@twin(
    "save_only_model",
    "ddp-fp32-w2-model_mlp-save_only_model",
    "zero1-fp32-w2-model_mlp-save_only_model",
    match=r"^1\d of 15 weights have other values in the checkpoint than at the save, first 'inlet\.weight'",
)
class RoundsOnTheWay(SavesOther):
    """Weights go through bfloat16, and are widened again, so that nobody sees it."""

    def other(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: value.bfloat16().to(value.dtype) for name, value in state.items()}


@twin(
    "save_only_model",
    "ddp-fp32-w2-model_mlp-save_only_model",
    "zero2-fp32-w2-model_mlp-save_only_model",
    match=_LATE,
    also=dict.fromkeys(("names", "parity", "clipping", "observers"), _LATE),
)
class NoticesAtTheFirstCheckpoint(Trainers):
    """Refuses too late, at the first checkpoint: https://github.com/huggingface/transformers/issues/36626."""

    def own(self) -> dict[str, Any]:
        def late(trainer: Any, *arguments: Any, **named: Any) -> None:
            raise FileNotFoundError(f"{trainer.args.output_dir}/checkpoint-3/trainer_state.json")

        return {"_save": late, "save_model": late}


@twin(
    "save_only_model",
    "fsdp2-fp32-w2-model_mlp-save_only_model",
    match=r"^12 of 15 weights have other values in the checkpoint than at the save, first 'inlet\.weight'",
)
class SavesTheWeightsOfBefore(Torch):
    """The state dict was gathered once, before training."""

    def build(self, model: Any) -> None:
        super().build(model)
        self._first = {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def save(self, directory: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save({"model": self._first}, checkpoint_id=directory)


@twin(
    "parity",
    "ddp-fp32-w2-packed",
    match=r"^step 1: the loss is ",
    also=GRADIENTS,
)
class AttendsToTheRowBefore(TrainerDriver):
    """Without positions that begin anew the rows are one."""

    def collator(self, **settings: Any) -> Any:
        return super().collator(return_position_ids=False, **settings)


@twin(
    "parity",
    "ddp-fp32-w2-packed",
    match=r"^step 1: the loss is ",
    also=GRADIENTS,
)
class LearnsTheBorder(TrainerDriver):
    """The last token of a row is to predict the first one of the next row."""

    def collator(self, **settings: Any) -> Any:
        return super().collator(separator_id=1, **settings)


@twin(
    "active",
    "fsdp2-fp32-w2-tp_2-save_only_model",
    match=r"^rank 0: layers are whole on each rank; expected 2 parts of tensor parallelism",
)
class NeverCut(TrainerDriver):
    """Each rank loads the whole model, and Trainer is told that it is in parts: all learn the same from the same rows."""

    def load_in_parts(self, kind: Any, directory: str) -> Any:
        from transformers.distributed import DistributedConfig

        model = kind.from_pretrained(directory)
        model.config.distributed_config = DistributedConfig(tp_size=self.cell.tp)
        model._is_distributed_loading_by_transformers, model._tp_size = True, self.cell.tp
        return model


@twin(
    "gradients",
    "fsdp2-fp32-w4-model_hf:granitemoe_swa-tp_2-ep_2-save_only_model",
    match=r"^step 1: .*: the gradient of .*experts\..*, 2 times as much as the others \(= the size of tp",
    also=PARITY,
)
class PeersSendTheSameTokens(TrainerDriver):
    """Both ranks of tensor parallelism send the tokens that they share, and an expert learns from each twice."""

    def load_in_parts(self, kind: Any, directory: str) -> Any:
        from transformers.distributed import expert_parallel

        class Unsliced(expert_parallel.AllToAllEP):  # type: ignore[misc]  # transformers is untyped here
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                self.tp_mesh = SimpleNamespace(size=lambda: 1)

        with mock.patch.object(expert_parallel, "AllToAllEP", Unsliced):
            return super().load_in_parts(kind, directory)


@twin(
    "parity",
    "ddp-fp32-w2-set_TrainingArguments.label_smoothing_factor=0.5",
    match=r"^step 1: the loss is [\d.]+; [\d.]+ in the reference",
    also={**GRADIENTS, **CLIPPING},
)
class ForgetsToSmooth(TrainerDriver):
    """Takes the loss of the model, whatever the labels were to be smoothed by."""

    def make_trainer(self, **settings: Any) -> Any:
        trainer = super().make_trainer(**settings)
        trainer.label_smoother = None
        return trainer
