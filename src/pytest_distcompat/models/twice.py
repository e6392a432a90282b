"""One block that each forward uses two times, and a layer whose weight is used outside its own forward.

The parameters are views of one storage, and attributes are handed on to the block.
"""

from __future__ import annotations

from pytest_distcompat.models._classifier import classifier

TWICE = classifier("twice", "Twice", frozen_modules=("inlet",), order=3)
