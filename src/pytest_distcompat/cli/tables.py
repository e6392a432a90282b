"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], indent: str = "  ") -> Iterator[str]:
    """Yield a line for the heads and one for each row, in columns of equal width."""
    lines = [list(heads), *([str(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (value.ljust(width) for value, width in zip(line, widths, strict=True))
        yield f"{indent}{'  '.join(cells)}".rstrip()
