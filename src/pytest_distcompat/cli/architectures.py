"""``architectures``: builds each model of the profile ``zoo`` once, and says why the others are left out."""

from __future__ import annotations

import argparse
import warnings
from typing import TYPE_CHECKING, Any

from pytest_distcompat.cli.tables import table
from pytest_distcompat.models import architecture, architectures

if TYPE_CHECKING:
    from pytest_distcompat.models import TinyModel


def add(commands: Any) -> None:
    """Add the subcommand to the parser's."""
    parser = commands.add_parser(
        "architectures",
        help="the architectures of transformers that the profile zoo trains",
        description="Build each architecture of the profile zoo, and take one step. Exit code 1: one fails that is not known to.",
    )
    parser.add_argument("names", nargs="*", metavar="MODEL", help="only these: hf:qwen3 (default: all)")
    parser.set_defaults(call=_architectures)


def _architectures(options: argparse.Namespace) -> int:
    names = options.names or architectures()
    rows, failed = [], 0
    for name in names:
        tiny = architecture(name)
        result = tiny.unsupported_reason or step(tiny)
        failed += not tiny.unsupported_reason and not result.endswith("parameters")
        rows.append((name, result))
    built = sum(result.endswith("parameters") for _, result in rows)
    print("\n".join(table(("model", "built, or why not"), rows)))  # noqa: T201 - a command speaks
    print(f"{built} of {len(rows)} architectures, {failed} failed")  # noqa: T201 - a command speaks
    return int(failed > 0)


def step(tiny: TinyModel) -> str:
    """Make the model and do a forward and a backward pass; return its size, or the exception's first line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = tiny.make()
            tiny.loss(model, tiny.batch(0, 0)).backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"
    return f"{sum(parameter.numel() for parameter in model.parameters())} parameters"
