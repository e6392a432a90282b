"""Compiles transformers' patterns of parameter names in the fork server.

In each rank it takes a twentieth of a second.
"""

from __future__ import annotations

import contextlib

# Older releases have none, newer ones may move them; tests/launch/test_private_names.py fails then.
with contextlib.suppress(ImportError, AttributeError):
    from transformers import conversion_mapping

    conversion_mapping.get_checkpoint_conversion_mapping("llama")
