"""An ordinary test, on every rank."""

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.distcompat(world_size=2)
def test_the_accuracy_is_kept(tmp_path: Path, process_group: Any, rank: int) -> None:
    import torch
    from accuracy_trainer import AccuracyTrainer
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
    rows = [{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * 4
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "max_steps": 2, "save_strategy": "no"}
    trainer = AccuracyTrainer(
        model, TrainingArguments(**settings, report_to="none", disable_tqdm=True), train_dataset=rows
    )
    trainer.train()
    assert trainer.args.process_index == rank
    assert trainer.accuracy is not None
    assert 0 <= trainer.accuracy <= 1
