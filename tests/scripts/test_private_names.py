"""One test for each private name that scripts are probed by: when it fails, the message says what needs attention."""

from __future__ import annotations

import pytest

from pytest_distcompat.scripts import trainer_points


def test_trainer_still_writes_its_checkpoints_in_one_method() -> None:
    transformers = pytest.importorskip("transformers")
    assert callable(getattr(transformers.Trainer, trainer_points.SAVE, None)), "scripts/trainer_points.py: SAVE"


def test_accelerate_still_has_one_state_for_all() -> None:
    state = pytest.importorskip("accelerate.state")
    assert isinstance(state.PartialState._shared_state, dict), "scripts/bridge.py: _accelerate"


def test_a_compiled_model_still_holds_the_one_it_was_given() -> None:
    torch = pytest.importorskip("torch")
    plain = torch.nn.Linear(2, 2)
    assert torch.compile(plain)._orig_mod is plain, "probe/parts.py: unwrapped"
