"""Texts to show or to send: cut, escaped, explained."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

#: How many kinds of names a sentence lists.
LISTED = 3


def excerpt(text: str, most: int) -> str:
    """Return the text, cut in the middle if it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail]}\n... {len(text) - most} characters cut ...\n{text[-tail:]}"


def name_patterns(names: Sequence[str]) -> list[str]:
    """Return the names in their order, several that differ in their numbers alone as one: ``layers.*.router.weight``."""
    patterns = {name: re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names}
    counts = Counter(patterns.values())
    return list(dict.fromkeys(kind if counts[kind] > 1 else name for name, kind in patterns.items()))


def listed(names: Sequence[str]) -> str:
    """Return the names for a sentence, several that differ in their numbers alone as one, of many the first few."""
    kinds = name_patterns(names)
    more = f" and {len(kinds) - LISTED} others" if len(kinds) > LISTED else ""
    return f"{', '.join(kinds[:LISTED])}{more}"


def encodable(text: str) -> str:
    """Return the text with lone surrogates escaped: one in a report would end a whole session of xdist."""
    return text.encode("utf-8", "backslashreplace").decode()


#: Control characters, those that reverse the text that follows (https://trojansource.codes), and surrogates.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Return the text as one line without effect on a terminal: control characters as Python writes them."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def explained(message: str) -> str:
    """Return the message of an exception; add the likely cause if it only says that a debugger quit."""
    if message != "bdb.BdbQuit":
        return message
    return f"{message}: the debugger was left, or found no terminal; ranks that torchrun starts in one have it"


#: Ranks by their numbers, as messages have them, whose node is not said yet.
_RANKS = re.compile(r"\branks? (\d+(?:(?:, | and )\d+)*)\b(?! on | others| more)")


def name_nodes(text: str, nodes: Sequence[str]) -> str:
    """Return a text with the node of each rank that it names: ``ranks 0 and 1 on n1, rank 2 on n2``.

    ``nodes`` has the name of each rank's node, in rank order; without nodes, and for numbers beyond, nothing changes.
    """

    def named(found: re.Match[str]) -> str:
        by_node: dict[str, list[str]] = {}
        for number in re.findall(r"\d+", found[1]):
            if int(number) >= len(nodes):
                return found[0]
            by_node.setdefault(nodes[int(number)], []).append(number)
        return ", ".join(
            f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)} on {node}" for node, ranks in by_node.items()
        )

    return _RANKS.sub(named, text) if nodes else text
