"""Trials on real ranks: what a candidate reaches, and the law that judges it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_distcompat.ext.search.trial import refuses_in_words
from pytest_distcompat.trace import RunFailure

PASSING = "tests.search.passing:PassingDriver"
ROOT = Path(__file__).parents[2]


def searched(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest_distcompat.cli", "search", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("raised", "statement", "refused"),
    [
        ("ValueError: size 0: expected more", 'raise ValueError("size")', True),
        ("AssertionError: size", "assert size, 'size'", True),
        ("RuntimeError: shape '[4]' is invalid", "return tensor.view(4)", False),
        ("KeyError: 'size'", "raise KeyError(size)", False),
        ("AttributeError: no size", "raise AttributeError('no size')", False),
        ("ValueError: ", "raise ValueError", False),
    ],
)
def test_a_refusal_is_raised_on_purpose_with_words(raised: str, statement: str, refused: bool) -> None:
    text = f'Traceback (most recent call last):\n  File "x.py", line 3, in save\n    {statement}\n{raised}'
    assert refuses_in_words(RunFailure("raised", f"rank 1 raised {raised}", text)) is refused
    assert not refuses_in_words(RunFailure("crashed", f"rank 1 raised {raised}", text))


@pytest.mark.spawn
@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("take(round_off=True)", r"FAIL: take\(round_off=True\): all ranks: parameters changed"),
        pytest.param("take(kind='none')", r"refused: rank \d raised ValueError: kind none", marks=pytest.mark.nightly),
        pytest.param(
            "take(depth=1000003)",
            r"FAIL: take\(depth=1000003\): raised: KeyError: 1000003",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_an_argument_is_judged(call: str, words: str) -> None:
    done = searched("--driver", PASSING, "--cell", "ddp-fp32-w2-model_mlp", "--calls", f"step(), {call}")
    assert re.search(words, done.stdout), done.stdout + done.stderr
    assert done.returncode == words.startswith("FAIL")


@pytest.mark.spawn
@pytest.mark.nightly
def test_a_finding_is_reduced_and_kept_with_its_command(tmp_path: Path) -> None:
    calls = ["step()", "take(round_off=True, kind='whole')", "evaluate()"]
    corpus = [{"driver": PASSING, "cell": "ddp-fp32-w2-model_mlp", "calls": calls}]
    (tmp_path / "corpus.json").write_text(json.dumps(corpus))
    state = tmp_path / "state.json"
    arguments = ["--driver", PASSING, "--corpus", str(tmp_path / "corpus.json"), "--state", str(state)]
    done = searched(*arguments, "--candidates", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    command = re.escape(f"distcompat search --driver {PASSING} --cell ddp-fp32-w2-model_mlp --calls ")
    # Without a step before it more of the trainer may be found to have changed first.
    assert re.search(rf"{command}'(step\(\), )?take\(round_off=True\)'", done.stdout), done.stdout
    again = searched(*arguments, "--candidates", "0")
    assert again.returncode == 1
    assert "1 candidates in" in again.stdout
    assert "take(round_off=True)'" in again.stdout
