"""Mutated packages and tests are importable by name; one sound stack serves all mutants."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1])

if TESTS not in sys.path:
    sys.path.append(TESTS)
