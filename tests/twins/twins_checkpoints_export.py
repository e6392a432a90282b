"""Trainers whose exported weights are not the trained ones, or not what the model's own library loads; and buffers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .declare import OBSERVERS, Accelerate, Torch, twin
from .twins_checkpoints import write

if TYPE_CHECKING:
    from pathlib import Path

    from torch.nn import Module


class Exports(Torch):
    """Exports soundly, by way of ``changed``."""

    file = "model.safetensors"

    def changed(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the part of the state dict that is written."""
        return state

    def export(self, directory: Path) -> None:
        from safetensors.torch import load_file

        super().export(directory)
        if self.world.rank == 0:
            write(directory, self.file, self.changed(load_file(directory / "model.safetensors")))


@twin(
    "export",
    "ddp-fp32-w2",
    match=r"key 'module\.lm_head\.weight' and 20 others are none of the model's own; expected 'lm_head\.weight'\n"
    r"21 of 21 names are in no exported file(?s:.*)parameter 'lm_head\.weight' and \d+ others: other values after the reload",
    also={"names": r"key 'module\.lm_head\.weight' is no name of the unwrapped model; expected 'lm_head\.weight'"},
)
class WrappersNamesExported(Exports):
    """transformers takes weights under such names for missing ones and makes new ones at random, with a warning."""

    def changed(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"module.{name}": value for name, value in state.items()}


@twin(
    "export",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^parameter 'blocks\.0\.linear\.bias' and 13 others: other values after the reload$",
)
class RoundedExport(Exports):
    """Written in float32, of values that went through bfloat16: too little for outputs to show."""

    def changed(self, state: dict[str, Any]) -> dict[str, Any]:
        # Of buffers there is but 0.5.
        return {name: value.bfloat16().float() for name, value in state.items()}

    def evaluate(self, model: Module) -> Any:
        # The outputs are not what this twin is about.
        return super().evaluate(model).bfloat16().float().round(decimals=1)


@twin(
    "export",
    "ddp-fp32-w2-model_mlp",
    match=r"^parameter 'blocks\.0\.linear\.bias' and 13 others: other values after the reload$",
    also=OBSERVERS,
)
class RoundsTheLiveModel(Torch):
    """``model.bfloat16().save_pretrained(...)``: the live model is rounded too, and its outputs are those of what is written."""

    def export(self, directory: Path) -> None:
        import torch

        self.raw.to(torch.bfloat16)
        super().export(directory)


@twin(
    "export",
    "fsdp1-fp32-w2-model_mlp",
    match=r"^buffer 'scale': other values after the reload\nrank 0: outputs of the trained and of the reloaded model are up to",
)
class BufferNotExported(Exports):
    """A running statistic is exported as it was made."""

    def changed(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "scale": state["scale"] * 0 + 1}


@twin(
    "export",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^file 'export/optimizer\.pt' holds 12 keys of an optimizer; expected the model alone$",
)
class OptimizerExported(Exports):
    """Twice as much again, which nobody who downloads the model can use."""

    def export(self, directory: Path) -> None:
        import torch

        super().export(directory)
        if self.world.rank == 0:
            names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
            torch.save({"state": {name: {"step": 20} for name in names}}, directory / "optimizer.pt")


class InSeveralFiles(Accelerate):
    """Its export is changed only once all ranks are done: ``save_model`` writes the index on each of them."""

    def export(self, directory: Path) -> None:
        super().export(directory)
        self.accelerator.wait_for_everyone()
        if self.world.rank == 0:
            self.change(directory)

    def change(self, directory: Path) -> None:
        """Spoil the files."""
        raise NotImplementedError


@twin(
    "export",
    "ddp-fp32-w2",
    match=r"^file 'export/model\.safetensors\.index\.json': it names 1 keys that are not in their files, first 'lm_head\.weight' in "
    r"'model-\d+-of-\d+\.safetensors'\nfile [^\n]*: 1 keys beside it are not in it, first 'lm_head\.weight' in ",
)
class OtherFileInTheIndex(InSeveralFiles):
    """transformers takes what is not in the file that the index names for missing, and makes it new."""

    def change(self, directory: Path) -> None:
        path = directory / "model.safetensors.index.json"
        index = json.loads(path.read_text(encoding="utf-8"))
        files = index["weight_map"]
        files["lm_head.weight"] = next(file for file in files.values() if file != files["lm_head.weight"])
        path.write_text(json.dumps(index), encoding="utf-8")


@twin(
    "export",
    "ddp-fp32-w2",
    match=r"^file 'export/model\.safetensors\.index\.json': 1 keys are in a second file too, first 'lm_head\.weight' in "
    r"'model-\d+-of-\d+\.safetensors'$",
)
class InTwoFiles(InSeveralFiles):
    """A tensor of an earlier export stays in another file: whoever reads all files may take that one."""

    def change(self, directory: Path) -> None:
        from safetensors.torch import load_file, save_file

        index = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))
        own = index["weight_map"]["lm_head.weight"]
        other = directory / next(file for file in index["weight_map"].values() if file != own)
        old = load_file(directory / own)["lm_head.weight"] * 0
        save_file({**load_file(other), "lm_head.weight": old}, other, metadata={"format": "pt"})


@twin(
    "export",
    "ddp-fp32-w2",
    match=r"^file 'export/model\.safetensors\.index\.json': total_size is 53568; the tensors that it names have 107136 bytes$",
)
class SizeOfAnotherDtype(InSeveralFiles):
    """The index has the size of what was to be written in bfloat16, by which others reserve memory."""

    def change(self, directory: Path) -> None:
        path = directory / "model.safetensors.index.json"
        index = json.loads(path.read_text(encoding="utf-8"))
        index["metadata"]["total_size"] //= 2
        path.write_text(json.dumps(index), encoding="utf-8")


@twin(
    "export",
    "ddp-fp32-w2-model_mlp",
    match=r"^rank 0: outputs of the trained and of the reloaded model are up to [\d.e-]+ apart \(\S+ allowed, of \S+\)\nrank 1:",
)
class OtherModelReloaded(Torch):
    """Reloads the weights into a model with another setting, which no state dict holds."""

    def reload(self, directory: Path) -> Module:
        model: Any = super().reload(directory)
        model.offset += 1
        return model  # type: ignore[no-any-return]


@twin(
    "names",
    "ddp-fp32-w2-model_mlp",
    match=r"^file '\.': holds 'offset', a buffer that is not persistent$",
)
class NonPersistentSaved(Torch):
    """Every buffer is saved, those too that the model makes by itself: the next version of it may not have them."""

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        buffers = {name.removeprefix("module."): buffer for name, buffer in self.model.named_buffers()}
        return {**state, "model": {**state["model"], **buffers}}


@twin(
    "names",
    "ddp-fp32-w2-model_mlp",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^rank 0: buffer 'offset' \(non-persistent\) has other values after build than in the unwrapped model\nrank 1: [^\n]+$",
)
class BufferNotFilled(Torch):
    """Made without memory and filled from a state dict, which has no such buffer: whatever memory held."""

    def build(self, model: Module) -> None:
        super().build(model)
        for name, buffer in self.model.named_buffers():
            if name.endswith("offset"):
                # Too little for a loss to show.
                buffer.fill_(1e-12)


@twin(
    "export",
    "ddp-fp32-w2-model_mlp",
    match=r"^1 of \d+ outputs of the reloaded model are infinite; expected finite numbers$",
)
class ReloadedOverflows(Torch):
    """Reloads a model that computes one infinite output, beside which any other number looks small."""

    def evaluate(self, model: Module) -> Any:
        outputs = super().evaluate(model).clone()
        if self.model is None:
            outputs.view(-1)[0] = float("inf")
        return outputs
