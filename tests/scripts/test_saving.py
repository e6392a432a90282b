"""Sound scripts that save otherwise than by a checkpoint, or not at all, and those whose files are wrong."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from pytest_distcompat.ext.scripts import ScriptRun
from pytest_distcompat.failures import Incompatible, UsageProblem

from .conftest import Launch

pytestmark = pytest.mark.spawn


def saving(run: Launch, how: str, *more: str, **settings: Any) -> ScriptRun:
    args = ("--output", "{output}", "--saves", how, *more)
    return run("saving_loop.py", *args, **{"strategy": "ddp", "blocks": ("Layer",), **settings})


@pytest.mark.parametrize(
    "how",
    [
        "safetensors",
        *(pytest.param(how, marks=pytest.mark.nightly) for how in ("nothing", "metrics", "parts", "renamed at once")),
    ],
)
def test_a_sound_script(run: Launch, how: str) -> None:
    """One that saves no model has only its live names judged; one that does may do it in any number of files."""
    saving(run, how).check("active", "names", "optimizer")


@pytest.mark.nightly
def test_a_script_that_leaves_no_model(run: Launch) -> None:
    """The files that are there are what was left."""
    saving(run, "renamed at once", output="{output}").check("names", "final_model_loadable")
    with pytest.raises(Incompatible, match="4 of 4 parameters are in no saved file"):
        saving(run, "nothing", output="{output}").check("names")


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["safetensors", pytest.param("bytes", marks=pytest.mark.nightly)])
def test_a_file_of_safetensors_beside_an_optimizers(run: Launch, how: str) -> None:
    """By ``save_file``, which the probe sees, or by ``save``, which leaves the writing to the script."""
    saving(run, how, output="{output}").check("names", "final_model_loadable")


@pytest.mark.nightly
@pytest.mark.parametrize("output", ["{output}", pytest.param("", id="seen", marks=pytest.mark.nightly)])
def test_a_model_that_is_saved_module_by_module(run: Launch, output: str) -> None:
    """As sentence-transformers saves it, whose first module lies beside the list of all."""
    script_run = saving(run, "modules", **({"output": output} if output else {}))
    script_run.check("names", "final_model_loadable")


@pytest.mark.nightly
def test_a_loop_in_a_function_that_returns_with_its_model(run: Launch) -> None:
    """It takes more steps than the probe watches, and the weights after the last one are compared."""
    script_run = run("main_loop.py", "--output", "{output}", output="{output}", strategy="ddp")
    script_run.check("active", "names", "optimizer", "dtypes", "memory", "final_model_loadable")


@pytest.mark.nightly
def test_a_state_dict_with_both_names_of_a_tied_tensor(run: Launch) -> None:
    """As ``torch.save(model.state_dict())`` writes them, nanoGPT's way."""
    saving(run, "both names", "--tied", output="{output}").check("names", "final_model_loadable")
    message = r"'layers\.1\.weight' has other values than 'layers\.0\.weight': in the trained model they are one tensor"
    with pytest.raises(Incompatible, match=message):
        saving(run, "both names apart", "--tied", output="{output}").check("final_model_loadable")


@pytest.mark.nightly
def test_a_model_of_which_a_part_is_saved(run: Launch) -> None:
    with pytest.raises(Incompatible, match=r"2 of 4 parameters are in no saved file, first 'layers\.1\.bias'"):
        saving(run, "one part").check("names")


@pytest.mark.nightly
def test_names_that_the_script_maps_when_it_saves(run: Launch) -> None:
    with pytest.raises(Incompatible, match=r"key 'net\.layers\.0\.bias' is no name of the unwrapped model"):
        saving(run, "renamed").check("names")
    mapped = saving(run, "renamed", output="{output}", saved_name=lambda key: key.removeprefix("net."))
    mapped.check("names", "final_model_loadable")
    with pytest.raises(UsageProblem, match="saved_name='net': expected a function of a saved key"):
        saving(run, "renamed", saved_name="net")


needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")


@pytest.mark.nightly
def test_names_of_a_part_that_its_library_loads_by_itself(run: Launch) -> None:
    """The files and the model that ``from_pretrained`` makes of them have equal names."""
    pytest.importorskip("accelerate")
    args = ("--inside", "--output", "{output}", "--steps", "4")
    settings: dict[str, Any] = {"launcher": "accelerate", "strategy": "ddp", "output": "{output}/final"}
    mapped = run("accelerate_loop.py", *args, **settings, saved_name=lambda key: f"inner.{key}")
    mapped.check("names", "final_model_loadable")


ADAPTER: dict[str, Any] = {"options": {"lora": True}, "output": "{output}"}


@pytest.mark.nightly
@needs_peft
def test_an_adapter_and_a_layer_that_is_trained_beside_it(run: Launch) -> None:
    """PEFT saves these alone: neither under the names that they have in the model, nor with the model below them."""
    checks = ("active", "names", "optimizer", "dtypes", "final_model_loadable")
    saving(run, "adapter", "--adapter", **ADAPTER).check(*checks)


@needs_peft
@pytest.mark.nightly
def test_an_adapter_that_is_not_what_was_trained(run: Launch) -> None:
    with pytest.raises(Incompatible, match=r"parameter '[\w.]+' and 3 others: other values after the reload"):
        saving(run, "adapter of the start", "--adapter", **ADAPTER).check("names", "final_model_loadable")


@pytest.mark.nightly
def test_an_optimizer_that_keeps_its_state_under_one_parameter(run: Launch) -> None:
    """LBFGS."""
    saving(run, "safetensors", "--lbfgs").check("active", "names", "optimizer", "dtypes")


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_trainable_parameter_that_no_loss_depends_on(run: Launch, strategy: str) -> None:
    """As BERT's pooler under a masked LM loss: the optimizer holds it, gets no gradient for it and has no state of it."""
    more = ("--shards",) if strategy == "fsdp2" else ()
    script_run = saving(run, "safetensors", "--unused", *more, strategy=strategy)
    script_run.check("active", "names", "optimizer", "memory", "dtypes")


@pytest.mark.nightly
def test_activation_checkpointing_of_the_script(run: Launch) -> None:
    """The launch names no such option, so that recomputing is no finding."""
    script_run = saving(run, "nothing", "--recompute", options={"compile": False})
    assert [verdict.status for verdict in script_run.verdicts("units")] == ["skipped"]
    script_run = run(
        "cut_loop.py", "--strategy", "fsdp1", "--wrap", "by hand", "--recompute", strategy="fsdp1", blocks="Block"
    )
    script_run.check("units")
