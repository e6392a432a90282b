"""Long texts cut short, where they are shown or travel between processes."""

from __future__ import annotations


def excerpt(text: str, most: int) -> str:
    """The text, cut in the middle if it has more than ``most`` characters: how it begins and how it ends tells most."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail]}\n... {len(text) - most} characters cut ...\n{text[-tail:]}"
