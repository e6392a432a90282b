"""One test for each private name that scripts are probed by: when it fails, the message says what needs attention."""

from __future__ import annotations

import pytest

from pytest_distcompat.ext.scripts import instrumentation


def test_trainer_still_writes_its_checkpoints_in_one_method() -> None:
    transformers = pytest.importorskip("transformers")
    assert callable(getattr(transformers.Trainer, instrumentation.SAVE, None)), "scripts/instrumentation.py: SAVE"


def test_accelerate_still_has_one_state_for_all() -> None:
    state = pytest.importorskip("accelerate.state")
    assert isinstance(state.PartialState._shared_state, dict), "scripts/bridge.py: _accelerate"


def test_the_attributes_of_torchs_wrappers() -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    from pytest_distcompat.probe.blocks import unwrapped

    plain = torch.nn.Linear(2, 2)
    for wrapped in (torch.compile(plain), checkpoint_wrapper(plain), torch.compile(checkpoint_wrapper(plain))):
        assert wrapped is not plain
        assert unwrapped(wrapped) is plain, "probe/blocks.py: unwrapped"


def test_models_still_declare_their_blocks() -> None:
    transformers = pytest.importorskip("transformers")
    from pytest_distcompat.probe.blocks import declared_blocks, named_blocks

    torch = pytest.importorskip("torch")
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    wrappers = torch.nn.ModuleDict({"inside": model, "head": torch.nn.Linear(8, 1)})
    assert declared_blocks(model) == ("LlamaDecoderLayer",), "probe/blocks.py: declared_blocks"
    assert declared_blocks(wrappers) == ("LlamaDecoderLayer",)
    assert declared_blocks(wrappers["head"]) == ()
    assert named_blocks(wrappers, ("LlamaDecoderLayer",)) == ("inside.model.layers.0", "inside.model.layers.1")
    model.model.layers[0] = torch.compile(model.model.layers[0])
    assert named_blocks(model, ("LlamaDecoderLayer",)) == ("model.layers.0", "model.layers.1")


def test_an_adapter_still_declares_the_blocks_of_what_it_adapts() -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    from pytest_distcompat.probe.blocks import declared_blocks, named_blocks

    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    assert declared_blocks(adapted) == ("LlamaDecoderLayer",), "probe/blocks.py: declared_blocks"
    assert named_blocks(adapted, ("LlamaDecoderLayer",)) == ("base_model.model.model.layers.0",)
