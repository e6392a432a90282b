"""The tables and sections of the pages that say what the code says.

Those of ``MADE`` stand in the pages, and a test holds them against the code: ``python -m tests.cli.generated`` in the
repository's root writes them anew. Those of ``BUILT`` are long lists of what stands elsewhere in the repository: only the
site has them, by docs/hooks/built.py.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tests.machines.node_faults import EXECUTORS, FAULTS, MEASURED, Fault

from pytest_distcompat.cell import OPTIONS, Cell, OptionValue
from pytest_distcompat.checks import CHECKS, Check
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.ext.upstream.models import BLANK, BLANK_TASKS, of_tasks
from pytest_distcompat.known import KnownIssue, shipped
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.profiles import AXES, BESIDE_AXES
from pytest_distcompat.strategies import STRATEGIES, Dtypes
from pytest_distcompat.trace import ExtraState, Loader

from . import api_page
from .failing import EXAMPLES

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"(?<=<!-- made by tests/cli/generated.py: )(\w+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
#: The cell, with the driver that supports most, that the runs of a check are listed for.
CELL = Cell("fsdp2", "fp32")
#: What a driver says of itself beside its actions, in words.
CLAIMS: Mapping[str, str] = {
    "reshards": "Strategies whose checkpoints can be loaded at another world size.",
    "portable": "Strategy to the other one that can load its checkpoints.",
    "loaders": "The trainer's loaders by name, and the rows that each gives.",
    "extra_state": "Names of state beside model and optimizer, and what to expect of each.",
}
#: The titles of the columns of the dtype table.
COLUMNS: Mapping[str, str] = {
    "storage": "stored parameter",
    "compute": "product",
    "reduce": "gradients travel in",
    "gradient": "gradient the optimizer sees",
    "master": "master",
    "state": "state",
    "buffer": "buffers (loaded in float32)",
}


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Name and text of each block of a page that is made here."""
    return ((found[1], found[3]) for found in BLOCK.finditer(text))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code(words: Iterable[object]) -> str:
    """Each in backticks, the same one once."""
    return ", ".join(f"`{word}`" for word in dict.fromkeys(words))


def prose(text: str) -> str:
    """A docstring as Markdown, a line a paragraph."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return "\n\n".join(re.sub(r"(https?://[^\s)]+[^\s).,:;])", r"<\1>", one.replace("``", "`")) for one in paragraphs)


def checks() -> str:
    """The table of the checks."""

    def row(one: Check) -> list[str]:
        runs = [run.name for run in one.runs(CELL, TorchDriver).runs if run.name != "train"]
        claim = prose(one.text).partition("\n\n")[0].removeprefix("Check that ").removesuffix(".")
        source = f"../src/{one.claim.__module__.replace('.', '/')}.py"
        return [f"[`{one.name}`]({source})", claim, " ".join(f"`{run}`" for run in runs)]

    return table(("check", "checks that", "runs besides `train`"), map(row, CHECKS.by_name.values()))


def claims() -> str:
    """A section for each check: claim, an example of a failure, likely causes."""

    def section(one: Check) -> str:
        claim, _, causes = prose(one.text).partition("If it fails: ")
        # The first sentence is in the table.
        claim = claim.partition("\n\n")[2]
        example = EXAMPLES[one.name]
        findings = one.findings(example.story(example.cell).cell, example.story(example.cell).trace)
        cause = causes[:1].upper() + causes[1:]
        shown = f"```text\n{findings[0]}\n```"
        return f"### {one.name}\n\n{claim.lstrip()}{shown}\n\n**Causes.** {cause}\n"

    return "\n".join(map(section, CHECKS.by_name.values()))


#: An issue or a pull request on GitHub, and its number.
THREAD = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/(\d+)")


def upstream() -> str:
    """A list for each library: what is known of it, with the threads and the script that shows it."""
    declared: dict[str, list[KnownIssue]] = defaultdict(list)
    for issue in shipped():
        # What a library refuses, with a message, is not broken.
        if "refuse" not in issue.kind:
            declared[Path(issue.script).stem or f"{issue.link} {issue.reason}"].append(issue)
    scripts = {path.stem: path for path in sorted((DOCS / "upstream").glob("*.py"))}
    found: dict[str, list[str]] = defaultdict(list)
    for name in (*scripts, *(name for name in declared if name not in scripts)):
        issues, path = declared[name], scripts.get(name)
        if path:
            library = name.partition("_")[0]
            told = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            # Behind the versions.
            claim = re.sub(r"^[^:]*\d: | \(<https?://[^)]*\)", "", prose(told.partition("\n\n")[0])).removesuffix(".")
        else:
            library, claim = issues[0].requirements[0].name, issues[0].reason
            told = issues[0].link
        threads = THREAD.finditer(f"{told} {' '.join(issue.link for issue in issues)}")
        links = dict.fromkeys(f"[#{thread[1]}]({thread[0]})" for thread in threads)
        checks = list(dict.fromkeys(check for issue in issues for check in issue.check if check != "*"))
        seen = f"seen by {code(checks[:3])}{' and others' * (len(checks) > 3)}"
        parts = [*links, *([f"[script](upstream/{path.name})"] if path else []), *([seen] if checks else [])]
        found["transformers" if library == "peft" else library].append(f"- {'; '.join([claim, *parts])}\n")
    titles = {
        "torch": "torch",
        "accelerate": "accelerate",
        "transformers": "transformers and PEFT",
        "deepspeed": "DeepSpeed",
        "torchao": "torchao",
    }
    return "\n".join(f"## {title}\n\n{''.join(found.pop(library))}" for library, title in titles.items())


def mutants() -> str:
    """A list of the bugs that tests/mutants brings back, and where each is seen."""
    from mutants.catalog import MUTANTS
    from mutants.sightings import SIGHTINGS

    def line(one: Any) -> str:
        seen = ", ".join(f"{sight.driver} `{sight.cell}:{sight.check}`" for sight in SIGHTINGS[one.id])
        fix = next((link for link in one.upstream if "/pull/" in link), one.upstream[0])
        return f"- [{one.id}]({fix}): {one.symptom}. {seen}\n"

    return "".join(map(line, MUTANTS))


def traincheck() -> str:
    """A list of the errors of TrainCheck's paper, and the verdict of each."""
    from mutants.of_traincheck import VERDICTS

    return "".join(f"- [{name}]({link}): {verdict}\n" for name, (link, verdict) in VERDICTS.items())


def strategies() -> str:
    """Which drivers can do which strategy."""

    def drivers(name: str) -> str:
        able = (
            driver.name
            for driver in DRIVERS.by_name.values()
            if any(not driver.unsupported_reason(Cell(name, precision), "cuda") for precision in PRECISIONS.names())
        )
        return code(able)

    rows = ([f"`{one.name}`", one.meaning, drivers(one.name)] for one in STRATEGIES.by_name.values())
    return table(("strategy", "is", "drivers"), rows)


def precisions() -> str:
    """Return the table of dtypes that each precision loads, computes and stores in."""
    rows = (
        [f"`{one.name}`", one.load, f"8 bits in, {one.compute} out" if one.float8 else one.compute, one.master]
        for one in PRECISIONS.by_name.values()
    )
    return table(("precision", "loaded in", "products in", "masters and optimizer state in"), rows)


def dtypes() -> str:
    """Return the dtype table of bf16_upcast; strategies with equal rows share one."""
    alike: dict[Dtypes, list[str]] = {}
    for one in STRATEGIES.by_name.values():
        alike.setdefault(one.dtypes(PRECISIONS.get("bf16_upcast")), []).append(one.name)
    rows = (
        [code(names), *(getattr(row, column) or ("float32" if column == "buffer" else "") for column in COLUMNS)]
        for row, names in alike.items()
    )
    return table(("strategy", *COLUMNS.values()), rows)


def cell_options() -> str:
    """The further axes of a cell, and which drivers obey them."""

    def supporting(option: str) -> str:
        names = [driver.name for driver in DRIVERS.by_name.values() if option in driver.options]
        return "all" if len(names) == len(DRIVERS.by_name) else code(names)

    def words(values: Iterable[object]) -> str:
        return code({True: "yes", False: "no"}[value] if isinstance(value, bool) else value for value in values)

    rows = (
        [
            f"`{one.name}`",
            words(one.values),
            one.meaning,
            supporting(one.name),
        ]
        for one in OPTIONS.values()
    )
    return table(("option", "values, the default first", "means", "drivers"), rows)


def tasks() -> str:
    """Return the class that the profile ``zoo`` trains for each task of transformers, or why it trains none."""
    rows = ([f"`{task}`", f"`hf:{kind}`" if kind else BLANK_TASKS[task]] for task, kind in of_tasks().items())
    return table(("task", "trained, or why none is"), rows)


def left_blank() -> str:
    """Return the architectures that the profile ``zoo`` has no tiny model of, by the reason."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, reason in BLANK.items():
        found[reason].append(f"hf:{name}")
    return table(("no tiny model of", "why not"), ([code(names), reason] for reason, names in found.items()))


def beside_axes() -> str:
    """What no built-in driver has beside each axis of a mesh, of what some driver has without."""

    def able(strategy: str, precision: str, *chosen: tuple[str, OptionValue]) -> bool:
        options: dict[str, OptionValue] = dict(chosen)
        for driver in DRIVERS.by_name.values():
            tokens = [OPTIONS[name].token(value) for name, value in chosen]
            wanted = {
                name: value
                for token in (*options, *tokens, "+".join(options))
                for name, value in driver.needs_options.get(token, {}).items()
            }
            if options.get("ep"):
                wanted = {"model": "moe_deepspeed" if strategy.startswith("zero") else "moe_fused", **wanted}
            if options.get("sp"):
                wanted = {"tp": 2, **wanted}
            cell = Cell.of(strategy, precision, 8, **{**wanted, **options})
            if not driver.unsupported_reason(cell, "cuda"):
                return True
        return False

    def row(axis: str) -> list[str]:
        here = (axis, OPTIONS[axis].values[1])
        strategies = [name for name in STRATEGIES.names() if not able(name, "fp32", here)]
        others = [one for one in STRATEGIES.names() if one not in strategies]
        precisions = [name for name in PRECISIONS.names() if not any(able(one, name, here) for one in others)]
        beside = [
            name
            for name, value in [*((name, OPTIONS[name].values[1]) for name in AXES), *BESIDE_AXES]
            if name not in {axis, "model"} and not any(able(one, "fp32", here, (name, value)) for one in others)
        ]
        return [f"`{axis}`", code(strategies), code(precisions), code(beside)]

    return table(("axis", "strategies", "precisions", "axes and options"), map(row, AXES))


#: Methods that a driver need not have.
OPTIONAL = ("export", "reload", "evaluate", "reference", "overflow", "metrics")
#: The method that an action of a run calls, where it has another name; other actions call none, or the method of their name.
CALLED = {"rounded": "reference", "resumed_rows": "rows", "moved_rows": "rows"}


class Able(Driver):
    """Has every optional method but those it lacks, and makes every claim."""

    name = "able"
    reshards = STRATEGIES.names()
    portable: ClassVar[Mapping[str, str]] = {"ddp": "fsdp2", "fsdp2": "ddp"}
    loaders: ClassVar[Mapping[str, Loader]] = {"": Loader(resumes=True, moves=True)}
    extra_state: ClassVar[Mapping[str, ExtraState]] = {"": ExtraState()}
    lacks: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def can(cls, action: str) -> bool:
        return action not in cls.lacks


@dataclass(frozen=True)
class Step:
    """A row of the table of what a driver's methods bring.

    Attributes:
        methods: They are written together; several stand for one line of the table.
        words: What they are, if the first line of the docstring of the first does not say it.
        without: The attributes of ``Able`` that take away what the row brings; None for methods that every driver has.
        claim: The attribute that claims it, for what is no method.
    """

    methods: tuple[str, ...]
    words: str = ""
    without: Mapping[str, Any] | None = None
    claim: str = ""


#: From the first methods that one writes to the last.
STEPS_OF_A_DRIVER = (
    Step(("build_model", "build", "step"), "Make the model, make the trainer, take one optimizer step."),
    Step(("save",)),
    Step(("load",)),
    *(Step((name,), without={"lacks": (name,)}) for name in OPTIONAL),
    Step((), CLAIMS["reshards"], {"reshards": ()}, "reshards"),
    Step((), CLAIMS["portable"], {"portable": {}}, "portable"),
    Step(("rows",), CLAIMS["loaders"], {"loaders": {}}, "loaders"),
    Step((), CLAIMS["extra_state"], {"extra_state": {}}, "extra_state"),
)
#: Cells in which a check may apply that does not in others, by the words for them.
CELLS_OF_CHECKS = {
    "": CELL,
    "with `grad_accum`": Cell.of("fsdp2", "fp32", grad_accum=2),
    "with `save_only_model`": Cell.of("fsdp2", "fp32", save_only_model=True),
    "in `fp16_mixed`": Cell("ddp", "fp16_mixed"),
    "in `fp8`": Cell("fsdp2", "fp8"),
    "in `fp8` under ZeRO": Cell("zero2", "fp8"),
    "in one cell alone": Cell("ddp", "fp32"),
}
#: A method that more runs call is called by nearly all.
FEW_RUNS = 8


def cell_of(one: Check, driver: type[Driver]) -> str | None:
    """Return the words for the first cell in which the check applies to the driver; None if it does in none."""
    return next((words for words, cell in CELLS_OF_CHECKS.items() if not one.not_applicable(cell, driver)), None)


def needed_actions(one: Check) -> set[str]:
    """Return the actions without which the check fails: those of its runs up to the last snapshot that it reads."""
    cell = CELLS_OF_CHECKS[cell_of(one, Able) or ""]
    last = {run: (action, nth) for run, action, nth in one.until}
    needed: set[str] = set()
    for run in one.runs(cell, Able).runs:
        action, nth = last.get(run.name, ("", 0))
        places = [place for place, name in enumerate(run.actions) if name == action]
        if places and run.name not in one.raises:
            needed.update(run.actions[: places[nth] + 1])
        elif run.name in one.raises or not one.until:
            needed.update(run.actions)
    return needed


def brought_by(step: Step) -> list[Check]:
    """Return the checks that the methods of a row bring to a driver that has those of all rows above it."""
    if step.without is not None:
        without = type("Without", (Able,), dict(step.without))
        cells = CELLS_OF_CHECKS.values()
        return [
            one
            for one in CHECKS.by_name.values()
            if any(one.not_applicable(cell, without) and not one.not_applicable(cell, Able) for cell in cells)
        ]
    required = [name for other in STEPS_OF_A_DRIVER if other.without is None for name in other.methods]
    found = []
    for one in CHECKS.by_name.values():
        needed = needed_actions(one)
        last = [name for name in required if name in needed][-1:]
        if cell_of(one, Driver) is not None and last == [*step.methods[-1:]]:
            found.append(one)
    return found


def runs_with(step: Step) -> str:
    """Return the names of the runs in which a method of a row is called."""
    found = []
    for one in CHECKS.by_name.values():
        for run in one.runs(CELLS_OF_CHECKS[cell_of(one, Able) or ""], Able).runs:
            called = any(CALLED.get(action, action) in step.methods for action in run.actions)
            # Some are the run of another cell under a name of their own.
            if called and not run.same_as:
                found.append(run.name)
    return code(found) if len({*found}) <= FEW_RUNS else "all that train"


def actions() -> str:
    """Which checks become possible with each method or claim of a driver, from the first ones up."""

    def called(name: str) -> str:
        given = list(inspect.signature(getattr(Driver, name)).parameters)[1:]
        return f"`{name}({', '.join(given)})`"

    def first_line(name: str) -> str:
        return prose((getattr(Driver, name).__doc__ or "").strip().split("\n")[0])

    def check_words(one: Check) -> str:
        condition = cell_of(one, Able)
        if one.limit:
            condition = f"with `--distcompat-{one.limit}`"
        return f"`{one.name}` {condition or ''}".strip()

    rows = (
        [
            ", ".join([*([f"`{step.claim}`"] if step.claim else []), *map(called, step.methods)]),
            step.words or first_line(step.methods[0]),
            runs_with(step),
            ", ".join(map(check_words, brought_by(step))),
        ]
        for step in STEPS_OF_A_DRIVER
    )
    return table(("method or claim", "is", "runs that call it", "checks that become possible"), rows)


def node_faults() -> str:
    """Return the table of faults of a node, which executors' tests meet them, and after how many seconds they are said."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))

    def met(name: str, fault: Fault, executor: str) -> str:
        if executor in fault.impossible:
            return fault.impossible[executor]
        seconds = measured["seconds"].get(name, {}).get(executor, "")
        says = f"`{fault.instead[executor]}`" if executor in fault.instead else "✓"
        return f"{says} {seconds}".strip()

    rows = (
        [
            fault.words,
            f"`{fault.says}`" if fault.says else "the tests pass",
            str(fault.within or ""),
            *(met(name, fault, executor) for executor in EXECUTORS),
        ]
        for name, fault in FAULTS.items()
    )
    made = table(("n2", "says", "limit", *code(EXECUTORS).split(", ")), rows)
    return f"{made}\n`python benchmarks/node_faults.py`: {measured['on']}.\n"


def example_driver() -> str:
    """The driver of the example, whole."""
    text = (DOCS.parent / "examples" / "my_trainer" / "my_driver.py").read_text(encoding="utf-8")
    return f"```python\n{text}```\n"


#: The blocks of pages, by the name that stands in their first line.
MADE: Mapping[str, Callable[[], str]] = {
    "checks": checks,
    "strategies": strategies,
    "precisions": precisions,
    "dtypes": dtypes,
    "options": cell_options,
    "actions": actions,
    "driver": example_driver,
    "beside_axes": beside_axes,
    "node_faults": node_faults,
    **{name: functools.partial(api_page.section, name) for name in api_page.SECTIONS},
}

#: What the site alone has, by the name in the comment that it replaces.
BUILT: Mapping[str, Callable[[], str]] = {
    "claims": claims,
    "upstream": upstream,
    "mutants": mutants,
    "traincheck": traincheck,
    "left_blank": left_blank,
    "tasks": tasks,
}


def made(name: str) -> str:
    """The block of that name, between empty lines: a comment right beside a table would be a part of it."""
    return f"\n{MADE[name]().strip()}\n\n"


def write() -> None:
    """Write every block of every page anew."""
    for page in sorted(DOCS.glob("*.md")):
        old = page.read_text(encoding="utf-8")
        new = BLOCK.sub(lambda found: f"{found[1]}{found[2]}{made(found[1])}", old)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(page.name)


if __name__ == "__main__":
    write()
