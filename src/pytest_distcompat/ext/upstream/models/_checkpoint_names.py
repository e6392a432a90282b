"""Compiles transformers' patterns of parameter names, once in the fork server.

The models that are a Llama list this module as ``preload``: the process from which ranks are forked
imports it. Otherwise each rank would compile the patterns, which takes a twentieth of a second.
"""

from __future__ import annotations

import contextlib

# Older releases have none, newer ones may move them; tests/launch/test_private_names.py fails then.
with contextlib.suppress(ImportError, AttributeError):
    from transformers import conversion_mapping

    conversion_mapping.get_checkpoint_conversion_mapping("llama")
