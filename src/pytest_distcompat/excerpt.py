"""Texts made fit to be shown, or to travel between processes: cut short, escaped, bare names explained."""

from __future__ import annotations

import re


def excerpt(text: str, most: int) -> str:
    """The text, cut in the middle if it has more than ``most`` characters: how it begins and how it ends tells most."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail]}\n... {len(text) - most} characters cut ...\n{text[-tail:]}"


def encodable(text: str) -> str:
    """The text with lone surrogates escaped: an exception may hold some, and one in a report ends a whole run of xdist."""
    return text.encode("utf-8", "backslashreplace").decode()


#: What a terminal obeys, or what turns the text around that follows (https://trojansource.codes), and what no encoding has.
_OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Return the text as one line that does nothing to a terminal: control characters as Python writes them."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def explained(message: str) -> str:
    """What an exception says, and if it is only that a debugger quit, why it will have: ``breakpoint()`` raises that at once."""
    if message != "bdb.BdbQuit":
        return message
    return f"{message}: the debugger was left, or found no terminal; ranks that torchrun starts in one have it"
