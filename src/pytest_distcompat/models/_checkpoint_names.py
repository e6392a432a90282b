"""Imported by the fork server: has transformers compile its patterns of parameter names in checkpoints.

Whoever loads or saves a model of its needs them, some hundred regular expressions, and a rank that has to compile them is a
twentieth of a second later.
"""

from __future__ import annotations

import contextlib

# Older releases have none, newer ones may keep them elsewhere; tests/spawn/test_private_names.py says when they do.
with contextlib.suppress(ImportError, AttributeError):
    from transformers import conversion_mapping

    conversion_mapping.get_checkpoint_conversion_mapping("llama")
