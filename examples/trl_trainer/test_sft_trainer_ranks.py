"""An ordinary test, on every rank."""

from pathlib import Path

import pytest


@pytest.mark.distcompat(world_size=2)
def test_bfloat16_is_what_it_trains_in_by_itself(tmp_path: Path) -> None:
    """TrainingArguments do not: who comes from there trains another model at the same arguments."""
    from transformers import TrainingArguments

    trl = pytest.importorskip("trl")
    assert trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True).bf16
    assert not TrainingArguments(output_dir=str(tmp_path), use_cpu=True).bf16
