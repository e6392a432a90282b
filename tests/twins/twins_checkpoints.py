"""Trainers whose checkpoints go on elsewhere as something else: at another world size, under another strategy, from a
directory with another name, from a corrupted file."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.trainer import TrainerDriver

from .declare import Torch, twin
from .twins_resume import Corrupts, ModelNotLoaded

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch.nn import Module

    from pytest_distcompat.driver import OnAction, Plan


def lose_state(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer as if it had never stepped."""
    optimizer.state.clear()


class CorruptsAtFour(Torch):
    """Loads soundly at any world size; at four ranks it then corrupts one thing."""

    def corrupt(self) -> None:
        raise NotImplementedError

    def load(self, directory: Path) -> None:
        import torch

        super().load(directory)
        if self.world.size == 4:
            with torch.no_grad():
                self.corrupt()


@twin(
    "reshard",
    "ddp-fp32-w2-model_mlp",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^the optimizer's state is empty after the load at 4 ranks\nstep 'blocks\.0\.linear\.bias' and 11 others: other values one",
)
class StateForTwoRanks(CorruptsAtFour):
    """Optimizer state that fits only the number of ranks that saved it is dropped without a word."""

    def corrupt(self) -> None:
        lose_state(self.optimizer)


@twin(
    "reshard",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^exp_avg 'blocks\.0\.linear\.weight': other values after the load at 4 ranks$",
)
class OneShardStale(CorruptsAtFour):
    """The last rank has the state of one parameter of its own making."""

    def corrupt(self) -> None:
        if self.world.rank == 3:
            state = self.optimizer.state[self.model.get_parameter("blocks.0.linear.weight")]
            state["exp_avg"].to_local().zero_()


@twin(
    "reshard",
    "ddp-fp32-w2-model_mlp",
    match=r"parameter 'blocks\.0\.linear\.bias' and 11 others: unlike from rank to rank after the load at 4 ranks",
)
class NewRanksLoadNothing(CorruptsAtFour):
    """Only ranks that existed at the save load their file; the others get nothing."""

    def corrupt(self) -> None:
        if self.world.rank == 3:
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(0.5)


@twin(
    "reshard",
    "ddp-fp32-w2-model_mlp",
    match=r"^rank 0: lr of the optimizer's group 0 is [\d.]+ after the load at 4 ranks; 0\.\d+ was saved\nrank 1: lr",
)
class RateFollowsRanks(CorruptsAtFour):
    """The learning rate is scaled with the number of ranks, by a schedule that nobody asked for."""

    def corrupt(self) -> None:
        self.optimizer.param_groups[0]["lr"] *= 2


class CorruptsElsewhere(Corrupts):
    """Loads soundly; under the strategy that a checkpoint of DDP is carried to it then corrupts one thing."""

    def load(self, directory: Path) -> None:
        if self.cell.strategy == "fsdp2":
            super().load(directory)
        else:
            Torch.load(self, directory)


@twin(
    "portable",
    "ddp-fp32-w2-model_mlp",
    match=r"^exp_avg 'blocks\.0\.linear\.weight' and 1 others: other values after the load under fsdp2\nrank 0: loss 2",
)
class StateByPosition(CorruptsElsewhere):
    """The other strategy keeps its parameters in another order, and state is handed out by number."""

    def corrupt(self) -> None:
        first, second = (self.state_of(f"blocks.{n}.linear.weight") for n in (0, 1))
        first["exp_avg"], second["exp_avg"] = second["exp_avg"], first["exp_avg"]


@twin(
    "portable",
    "ddp-fp32-w2-model_mlp",
    match=r"^step 'blocks\.0\.linear\.bias' and 11 others: other values one step after the load under fsdp2\nrank 0: loss 2",
)
class StepsShared(CorruptsElsewhere):
    """All parameters share one count of steps, which each of them counts up: what FSDP1's flat full state loads as."""

    def corrupt(self) -> None:
        shared = self.state_of("blocks.0.linear.weight")["step"]
        for state in self.optimizer.state.values():
            state["step"] = shared


class NamesTheFile(Torch):
    """The sound one: torch.load says what is wrong with a file, and not which it is."""

    def load(self, directory: Path) -> None:
        try:
            super().load(directory)
        except Exception as error:
            raise OSError(f"{directory / 'checkpoint.pt'}: {error}") from error


@twin(
    "damage",
    "fsdp2-fp32-w2-model_mlp-state_dict_full",
    match=r"'checkpoint\.pt' is cut in half: it was loaded without an error, and training went on\nfile 'checkpoint\.pt' is gone",
    sound="twins.twins_checkpoints:NamesTheFile",
)
class FreshWeights(Torch):
    """Starts from scratch if the checkpoint cannot be loaded."""

    def load(self, directory: Path) -> None:
        with contextlib.suppress(Exception):
            super().load(directory)


@twin(
    "damage",
    "fsdp1-fp32-w2-model_mlp-state_dict_full",
    match=r"^file 'checkpoint\.pt' is cut in half: the error does not name it: rank \d raised RuntimeError: cannot resume\n"
    r"file 'checkpoint\.pt' is gone: the error does not name it",
    sound="twins.twins_checkpoints:NamesTheFile",
)
class HidesTheFile(Torch):
    """An error that says what was tried and not what was wrong."""

    def load(self, directory: Path) -> None:
        try:
            super().load(directory)
        except Exception:
            failure = RuntimeError("cannot resume")
        else:
            return
        raise failure


@twin(
    "paths",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^the optimizer's state is empty after the load from 'a run/of pytorch_model_fsdp and optimizer/größe é'$",
)
class SearchesThePath(Torch):
    """A path with ``optimizer`` in it is taken for that of the optimizer's own directory (accelerate #4119)."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        if "optimizer" in str(directory):
            lose_state(self.optimizer)


@twin("paths", "ddp-fp32-w2-model_mlp", match=r"raised \S*(CheckpointException|FileNotFoundError|Error)")
class CleansTheName(Torch):
    """Saves under a name without spaces, and loads from the one it was given."""

    def save(self, directory: Path) -> None:
        from pathlib import Path

        clean = Path(str(directory).replace(" ", "_"))
        clean.mkdir(parents=True, exist_ok=True)
        super().save(clean)


@twin(
    "paths",
    "ddp-fp32-w2-model_mlp",
    match=r"^a file is where the checkpoint's directory 'blocked here' should be: nothing was raised in the save, and training went on$",
)
class GoesOnWithoutCheckpoint(Torch):
    """What cannot be saved is a line in a log."""

    def save(self, directory: Path) -> None:
        with contextlib.suppress(Exception):
            super().save(directory)


@twin(
    "paths",
    "ddp-fp32-w2-model_mlp",
    match=r"^a file is where the checkpoint's directory 'blocked here' should be: the trainer was built without an error, although it",
)
class MovesCheckpoints(TrainerDriver):
    """Checkpoints are written elsewhere first, so that nobody looks at their directory before the first one."""

    def arguments(self, plan: Plan) -> dict[str, Any]:
        return {**super().arguments(plan), "output_dir": f"{plan.save_to}.part"}

    def train(self, model: Module, plan: Plan, report: OnAction) -> None:
        def moved(action: str, *result: Any) -> None:
            if action == "save" and self.world.rank == 0:
                shutil.copytree(f"{plan.save_to}.part", plan.save_to, dirs_exist_ok=True)
            report(action, *result)

        super().train(model, plan, moved)


@twin(
    "resume",
    "ddp-fp16_mixed-w2-model_mlp",
    match=r"^rank 0: the gradient scaler is at \{'scale': 1024\.0, .*'_growth_tracker': 0\S*\}; saved at \{.*: 3\.0\}\nrank 1: the",
)
class ScalerNotLoaded(Torch):
    """The loss scale starts again."""

    def load(self, directory: Path) -> None:
        state = self.scaler.state_dict()
        super().load(directory)
        self.scaler.load_state_dict(state)


@twin(
    "resume",
    "ddp-fp32-w2-model_mlp-save_only_model",
    match=r"^rank 0: parameter 'module\.blocks\.0\.linear\.bias' and 11 others: other values after the load\nrank 1: [^\n]+$",
)
class ModelAloneNotLoaded(ModelNotLoaded):
    """A checkpoint of the model alone, and not even that comes back."""


def write(directory: Path, name: str, state: dict[str, Any]) -> None:
    """One safetensors file of that name."""
    from safetensors.torch import save_file

    own = {key: value.detach().cpu().clone().contiguous() for key, value in state.items()}
    save_file(own, directory / name, metadata={"format": "pt"})


@twin(
    "observers",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^rank 0: the whole model is in evaluation mode in the step after the save; in training mode before it\nrank 1: [^\n]+$",
)
class EvaluatesBeforeItSaves(Torch):
    """No ``model.train()`` follows: what drops activations or counts statistics does so no more."""

    def save(self, directory: Path) -> None:
        self.model.eval()
        super().save(directory)
