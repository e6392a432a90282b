"""Tests of a script: not only its exit code, but what it trains and saves."""

from pathlib import Path
from typing import Any

TRAIN = Path(__file__).parent / "train.py"


def test_train(distcompat: Any, tmp_path: Path) -> None:
    run = distcompat.launch(TRAIN, "--output", tmp_path, strategy="fsdp2", output=tmp_path)
    run.check("active", "names", "optimizer", "dtypes", "memory", "final_model_loadable")
