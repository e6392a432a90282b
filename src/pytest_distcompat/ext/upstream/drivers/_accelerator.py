"""The Accelerator of the driver for accelerate: how a cell becomes its arguments.

``AccelerateDriver`` (``accelerate.py``) inherits ``MakesAccelerator``; its ``build`` calls
``_make_accelerator`` once on each rank. A cell is one configuration under test:
``fsdp2-bf16_upcast-w2-grad_accum_2`` becomes an ``Accelerator`` with an FSDP2 plugin,
``mixed_precision="bf16"`` and ``gradient_accumulation_steps=2``.

The arguments come from three places, a later one overrides an earlier one: the strategy's backend
config (``strategies/fsdp2.py`` and others), the cell's options, and the settings in its option
``set``. A setting names an object and a field: ``DataLoaderConfiguration.even_batches=false``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pytest_distcompat.ext.upstream.drivers.tiny import TinyDriver
from pytest_distcompat.ext.upstream.sweep.fields import Source
from pytest_distcompat.launch.accelerate_cpu import on_cpu


class MakesAccelerator(TinyDriver):
    """Driver that makes the ``Accelerator`` of its cell."""

    #: The objects of libraries whose fields a cell may set; ``AccelerateDriver`` has them.
    sources: ClassVar[tuple[Source, ...]] = ()
    #: The directory into which the run saves; None before ``train``.
    save_to: Path | None = None

    def _make_accelerator(self) -> Any:
        """Return the Accelerator of the strategy and the cell's options.

        ``kwargs_handlers`` are collected from several places: the strategy, fp8, ``on_cpu``.
        """
        from accelerate import Accelerator
        from accelerate.utils import ProjectConfiguration

        assert self.strategy.accelerate is not None
        settings = dict(self.strategy.accelerate(self.precision, self.cell, self.wrap_spec))
        settings["mixed_precision"] = self._mixed_precision()
        settings["gradient_accumulation_steps"] = self.accumulate
        settings |= self._compilation()
        # Where accelerate saves, if it names checkpoints itself or saves on each node.
        project: dict[str, Any] = {}
        if self.world.own_disks:
            project["save_on_each_node"] = True
        project = self.cell.with_settings("ProjectConfiguration", project)
        if project:
            settings["project_config"] = ProjectConfiguration(str(self.save_to), **project)
        # Taken out, since ``on_cpu`` may bring handlers too, and would override these. ``on_cpu``
        # returns what makes accelerate run FSDP and DeepSpeed without a GPU.
        handlers = [*settings.pop("kwargs_handlers", ()), *self._recipe()]
        if self.world.device == "cpu":
            settings |= on_cpu(settings)
        settings.setdefault("kwargs_handlers", []).extend(handlers)
        settings = self._with_objects(settings)
        return Accelerator(**self.cell.with_settings("Accelerator", settings))

    def _with_objects(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of Accelerator with the objects whose fields the cell sets.

        The setting ``DistributedDataParallelKwargs.static_graph=true`` adds such an object to
        ``kwargs_handlers``, or changes that field of the object that is among them.

        Args:
            settings: The arguments of Accelerator; ``kwargs_handlers`` is among them.
        """
        from accelerate import DataLoaderConfiguration, utils

        cell = self.cell
        accumulation = cell.settings("GradientAccumulationPlugin")
        if accumulation:
            # Accelerator takes the number of micro-batches or this plugin, not both.
            fields = {"num_steps": settings.pop("gradient_accumulation_steps"), **accumulation}
            settings["gradient_accumulation_plugin"] = utils.GradientAccumulationPlugin(**fields)
        loading = cell.settings("DataLoaderConfiguration")
        if loading:
            settings["dataloader_config"] = DataLoaderConfiguration(**loading)
        # Each kind of handler may be given once: class name -> handler.
        handlers = {type(handler).__name__: handler for handler in settings["kwargs_handlers"]}
        # Some plugins are subclasses of KwargsHandler too, and have an argument of their own.
        plugins = {source.name for source in self.sources}
        for handler_class in utils.dataclasses.KwargsHandler.__subclasses__():
            name = handler_class.__name__
            if name in plugins:
                continue
            fields = cell.settings(name)
            if fields:
                previous = vars(handlers[name]) if name in handlers else {}
                handlers[name] = handler_class(**{**previous, **fields})
        return settings | {"kwargs_handlers": list(handlers.values())}

    def _mixed_precision(self) -> str:
        """Return accelerate's name of the precision: ``no``, ``bf16``, ``fp16`` or ``fp8``.

        DeepSpeed's low-precision mode is ``bf16`` too, although all is in bfloat16 then.
        """
        if self.precision.float8:
            return "fp8"
        # Without mixed precision the model is computed in the dtype in which it was loaded.
        if self.precision.mixed or self.strategy.zero_stage is not None:
            return {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[self.precision.compute]
        return "no"

    def _compilation(self) -> dict[str, Any]:
        """Return the argument of Accelerator for torch.compile; empty if it compiles nothing.

        One block alone (``partial``) is compiled by ``_changed_in_place``.
        """
        from accelerate.utils import TorchDynamoPlugin

        mode = self.cell.option("compile")
        if mode in {False, "partial"}:
            return {}
        backend = "inductor" if mode is True else "aot_eager"
        settings: dict[str, Any] = {"backend": backend}
        if mode == "regional":
            settings["use_regional_compilation"] = True
        settings = self.cell.with_settings("TorchDynamoPlugin", settings)
        return {"dynamo_plugin": TorchDynamoPlugin(**settings)}

    def _recipe(self) -> list[Any]:
        """Return the handler for fp8 in a list, which is empty for other precisions.

        accelerate calls it a recipe: how linear layers compute in 8 bits. Parameters are not
        gathered in 8 bits, which DeepSpeed could not do.
        """
        if not self.precision.float8:
            return []
        if self.cell.option("fp8_backend") == "te":
            from accelerate.utils import TERecipeKwargs

            return [TERecipeKwargs(fp8_format="HYBRID")]
        from accelerate.utils import AORecipeKwargs
        from torchao.float8 import Float8LinearConfig

        config = Float8LinearConfig(emulate=self.world.device == "cpu", pad_inner_dim=True)
        return [AORecipeKwargs(config=config)]
