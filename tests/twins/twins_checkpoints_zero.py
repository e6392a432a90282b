"""Twins of checkpoints under ZeRO, through accelerate."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver

from .declare import twin
from .twins_checkpoints import write


class Rounds(AccelerateDriver):
    """Exported in float32, of values that went through bfloat16."""

    def export(self, directory: Path) -> None:
        from safetensors.torch import load_file

        super().export(directory)
        if self.world.rank == 0:
            state = load_file(directory / "model.safetensors")
            write(directory, "model.safetensors", {name: value.bfloat16().float() for name, value in state.items()})


twin(
    "export",
    "zero1-fp32-w2-model_mlp",
    match=r"^parameter 'blocks\.0\.linear\.bias' and 13 others: other values after the reload",
)(Rounds)
twin(
    "portable",
    "zero3-fp32-w2-model_mlp",
    match=r"^parameter 'blocks\.0\.linear\.bias' and 13 others: other values after the export and build",
)(Rounds)


@twin(
    "paths",
    "zero1-fp32-w2-model_mlp",
    match=r"^master 'blocks\.0\.linear\.bias' and 11 others: other values after the load from 'a run/(?s:.*)optimizer's state is empty|"
    r"^the optimizer's state is empty after the load from 'a run/",
)
class OnlyAscii(AccelerateDriver):
    """A path that it cannot read is taken for a first start."""

    def load(self, directory: Path) -> None:
        if str(directory).isascii():
            super().load(directory)


class NamesFiles(AccelerateDriver):
    """Sound: writes down what it saved and looks for it before it loads. DeepSpeed itself does not say which file is bad."""

    def save(self, directory: Path) -> None:
        super().save(directory)
        self.accelerator.wait_for_everyone()
        if self.world.rank == 0:
            saved = {str(path.relative_to(directory)): path.stat().st_size for path in directory.rglob("*.pt")}
            (directory / "saved.json").write_text(json.dumps(saved), encoding="utf-8")

    def load(self, directory: Path) -> None:
        for name, size in json.loads((directory / "saved.json").read_text(encoding="utf-8")).items():
            actual = (directory / name).stat().st_size if (directory / name).exists() else 0
            if actual != size:
                raise OSError(f"{name} has {actual} bytes; {size} were saved")
        super().load(directory)


# An empty AssertionError for the file that is gone, and an error of the zip reader for the other.
twin(
    "damage",
    "zero1-fp32-w2-model_mlp",
    match=r"model_states\.pt' is gone: the error does not name it: rank \d raised AssertionError$",
    sound="twins.twins_checkpoints_zero:NamesFiles",
)(AccelerateDriver)


@twin(
    "damage",
    "zero2-fp32-w2-model_mlp",
    match=r"model_states\.pt' is cut in half: it was loaded without an error, and training went on(?s:.*)is gone: it was loaded",
    sound="twins.twins_checkpoints_zero:NamesFiles",
)
class FreshWeightsZero(AccelerateDriver):
    """Starts from scratch if the checkpoint cannot be loaded."""

    def load(self, directory: Path) -> None:
        with contextlib.suppress(Exception):
            super().load(directory)


@twin(
    "reshard",
    "zero1-fp32-w2-model_mlp",
    match=r"^exp_avg_sq 'blocks\.0\.linear\.bias' and 11 others: other values after the load at 4 ranks$",
)
class MomentsForTwoRanks(DeepSpeedDriver):
    """The second moments of a universal checkpoint are not taken over at another world size."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        if self.world.size == 4:
            for state in self.optimizer.optimizer.state.values():
                state["exp_avg_sq"].zero_()


@twin(
    "reshard",
    "zero3-fp32-w2-model_mlp",
    match=r"^master 'blocks\.0\.linear\.bias' and 11 others: other values after the load at 1 rank",
)
class MastersForTwoRanks(DeepSpeedDriver):
    """In one process the masters are made anew, from weights that went through bfloat16."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        if self.world.size == 1:
            # Between steps ZeRO-3 leaves its param_groups empty.
            for master in self.optimizer.fp32_partitioned_groups_flat:
                master.data.copy_(master.data.bfloat16())
