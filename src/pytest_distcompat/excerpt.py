"""Texts to show or to send: cut, escaped, explained.

Texts come from users' tests and ranks: messages of exceptions, output, names of parameters. Each
function prepares one for a place: ``excerpt`` for reports, ``listed`` for a sentence of a check,
``encodable`` for JSON and xdist, ``visible`` for a terminal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

#: How many kinds of names a sentence lists.
LISTED = 3


def excerpt(text: str, most: int) -> str:
    """Return the text, cut in the middle if it has more than ``most`` characters.

    Two thirds of what is kept are from its beginning; a line says how much is cut.
    """
    if len(text) <= most:
        return text
    tail = most // 3
    head = most - tail
    cut = len(text) - most
    return f"{text[:head]}\n... {cut} characters cut ...\n{text[-tail:]}"


def name_patterns(names: Sequence[str]) -> list[str]:
    """Return the names in their order, similar ones as one pattern.

    ``layers.0.router.weight`` and ``layers.1.router.weight`` become ``layers.*.router.weight``. A
    name that is alone with its pattern stays as it is.
    """
    # Name -> the name with a star for each number between dots.
    patterns = {name: re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names}
    counts = Counter(patterns.values())
    # A dict, because it keeps the order and has each only once.
    shown: dict[str, None] = {}
    for name, pattern in patterns.items():
        shown[pattern if counts[pattern] > 1 else name] = None
    return list(shown)


def listed(names: Sequence[str]) -> str:
    """Return the names for a sentence: ``embed.weight, layers.*.bias, head.bias and 2 others``.

    Several that differ in their numbers alone are listed as one.
    """
    patterns = name_patterns(names)
    text = ", ".join(patterns[:LISTED])
    if len(patterns) > LISTED:
        return f"{text} and {len(patterns) - LISTED} others"
    return text


def encodable(text: str) -> str:
    r"""Return the text with lone surrogates escaped: ``\udc80`` as these six characters.

    Python reads bytes that are no UTF-8 as such characters, which cannot be encoded again. One in a
    report would end a whole session of xdist.
    """
    return text.encode("utf-8", "backslashreplace").decode()


#: Control characters, those that reverse the text that follows (https://trojansource.codes), and
#: surrogates.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Return the text as one line without effect on a terminal.

    Control characters stand as Python writes them: a line break as ``\n``.
    """

    def escaped(match: re.Match[str]) -> str:
        quoted = ascii(match[0])
        # Without the quotes.
        return quoted[1:-1]

    return _CONTROL.sub(escaped, text)


def explained(message: str) -> str:
    """Return the message of an exception, with its likely cause.

    A cause is added if the message only says that a debugger quit.
    """
    if message != "bdb.BdbQuit":
        return message
    return (
        f"{message}: the debugger was left, or found no terminal; "
        "ranks have one if torchrun starts them in a terminal"
    )
