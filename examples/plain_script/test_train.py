"""Tests of a script that is not changed for them: what it trains and saves, and whether it resumes."""

from pathlib import Path
from typing import Any

TRAIN = Path(__file__).parent / "train.py"


def test_train(distcompat: Any, tmp_path: Path) -> None:
    run = distcompat.launch(TRAIN, "--out-dir", tmp_path, strategy="ddp", output=tmp_path)
    run.check("active", "names", "optimizer", "dtypes", "memory", "final_model_loadable")


def test_resume(distcompat: Any) -> None:
    distcompat.resume_roundtrip(
        TRAIN,
        ["--out-dir", "{output}", "--max-iters", "{steps}", "--save-every", "{save_at}"],
        resume=["--resume"],
        save_at=3,
        total=5,
        strategy="ddp",
    )
