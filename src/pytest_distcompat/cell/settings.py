"""Values of single settings of libraries, as the option ``set`` of a cell writes them.

A setting reads ``OBJECT.FIELD=VALUE``, as ``DataLoaderConfiguration.even_batches=false``. It is
part of a cell's id and of a pytest item's name, so that ``VALUE`` may have no hyphen, space or
bracket. ``Cell.settings`` calls this module when a driver asks for the settings of one object.
"""

from __future__ import annotations

import contextlib
import json
import pkgutil
import re
from typing import Any


def setting_value(text: str) -> Any:
    """Return the value of a setting: of ``false`` it is False, of ``(1,2)`` the list [1, 2].

    It is JSON, a list in parentheses, the object of an import path (``torch.float32``), or the text
    itself.
    """
    # A hyphen, which would end a part of the cell's id, is spelled as a tilde.
    text = text.replace("~", "-")
    if text.startswith("("):
        values = []
        for part in text[1:-1].split(","):
            if part:
                values.append(setting_value(part))
        return values
    with contextlib.suppress(ValueError):
        return json.loads(text)
    if re.fullmatch(r"[a-z_]\w*(\.\w+)+", text):
        with contextlib.suppress(ImportError, AttributeError, ValueError):
            return pkgutil.resolve_name(text)
    return text
