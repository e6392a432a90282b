"""Tables and sections of the documentation that are made from the code.

Those of ``MADE`` stand in the pages. ``python -m tests.cli.generated`` in the repository's root writes them, and a test
fails if one is out of date. Those of ``BUILT`` are long lists: only the site has them, by docs/hooks/built.py.
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
from pytest_distcompat.ext.upstream.models import UNSUPPORTED, UNSUPPORTED_TASKS, of_tasks
from pytest_distcompat.known import KnownIssue, shipped
from pytest_distcompat.live_calls import Calls
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.profiles import AXES, BESIDE_AXES
from pytest_distcompat.scenario import Run
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
    "loaders": "The trainer's loaders by name, and the rows that each gives, with its length as `LoadedBatch`.",
    "extra_state": "Names of state beside model and optimizer, and what to expect of each.",
    "loads_best": "Whether training ends with the weights of its best checkpoint in a cell.",
    "live_calls": "What users call on the live trainer, `evaluate()` among it: a subclass of `drivers.Calls`.",
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
    """Yield name and text of each block of a page that is made here."""
    for match in BLOCK.finditer(text):
        yield match[1], match[3]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    titles = list(head)
    rule = ["---"] * len(titles)
    lines = []
    for cells in (titles, rule, *rows):
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def code(words: Iterable[object]) -> str:
    """Return the words in backticks, without repetitions."""
    distinct = dict.fromkeys(words)
    return ", ".join(f"`{word}`" for word in distinct)


def first_sentence(check: Check) -> str:
    """Return what a check claims, as a clause without its beginning and its full stop."""
    claim, _, _ = prose(check.text).partition("\n\n")
    return claim.removeprefix("Check that ").removesuffix(".")


def prose(text: str) -> str:
    """Return a docstring as Markdown, with each paragraph on one line."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        line = " ".join(paragraph.split()).replace("``", "`")
        paragraphs.append(re.sub(r"(https?://[^\s)]+[^\s).,:;])", r"<\1>", line))
    return "\n\n".join(paragraphs)


def checks() -> str:
    """Return the table of the checks."""

    rows = []
    for check in CHECKS.by_name.values():
        module = check.claim.__module__.replace(".", "/")
        link = f"[`{check.name}`](../src/{module}.py)"
        runs = []
        for run in check.runs(CELL, TorchDriver).runs:
            if run.name != "train":
                runs.append(f"`{run.name}`")
        rows.append([link, first_sentence(check), " ".join(runs)])
    return table(("check", "checks that", "runs besides `train`"), rows)


def claims() -> str:
    """Return a section for each check: claim, an example of a failure, likely causes."""

    def section(check: Check) -> str:
        claim, _, causes = prose(check.text).partition("If it fails: ")
        # The first sentence is in the table.
        claim = claim.partition("\n\n")[2]
        example = EXAMPLES[check.name]
        story = example.story(example.cell)
        findings = check.findings(story.cell, story.trace)
        cause = causes[:1].upper() + causes[1:]
        shown = f"```text\n{findings[0]}\n```"
        return f"### {check.name}\n\n{claim.lstrip()}{shown}\n\n**Causes.** {cause}\n"

    return "\n".join(map(section, CHECKS.by_name.values()))


#: An issue or a pull request on GitHub, and its number.
THREAD = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/(\d+)")


#: The sections of the list of upstream bugs, by library.
LIBRARIES = {
    "torch": "torch and torchdata",
    "accelerate": "accelerate",
    "transformers": "transformers and PEFT",
    "deepspeed": "DeepSpeed",
    "torchao": "torchao",
}


def upstream() -> str:
    """Return a list for each library: its known bugs, with the threads and the script that shows each."""
    issues_by_name: dict[str, list[KnownIssue]] = defaultdict(list)
    for issue in shipped():
        # What a library refuses, with a message, is not broken.
        if "refuse" not in issue.kind:
            script = Path(issue.script).stem
            issues_by_name[script or f"{issue.link} {issue.reason}"].append(issue)
    lines_by_library: dict[str, list[str]] = {library: [] for library in LIBRARIES}
    scripts = sorted((DOCS / "upstream").glob("*.py"))
    for path in scripts:
        text = docstring_of(path)
        line = bug_line(claim_of(text), text, path, issues_by_name.pop(path.stem, []))
        library, _, _ = path.stem.partition("_")
        lines_by_library[section_of(library)].append(line)
    for issues in issues_by_name.values():
        first = issues[0]
        line = bug_line(first.reason, first.link, None, issues)
        library = first.requirements[0].name
        lines_by_library[section_of(library)].append(line)
    sections = []
    for library, title in LIBRARIES.items():
        lines = "".join(lines_by_library[library])
        sections.append(f"## {title}\n\n{lines}")
    return "\n".join(sections)


def docstring_of(script: Path) -> str:
    tree = ast.parse(script.read_text(encoding="utf-8"))
    return ast.get_docstring(tree) or ""


def claim_of(docstring: str) -> str:
    """Return what a script shows: its first paragraph without the versions before it, and without links."""
    first, _, _ = docstring.partition("\n\n")
    claim = re.sub(r"^[^:]*\d: | \(<https?://[^)]*\)", "", prose(first))
    return claim.removesuffix(".")


#: Libraries whose bugs stand in the section of another one.
SECTIONS = {"peft": "transformers", "torchdata": "torch"}


def section_of(library: str) -> str:
    return SECTIONS.get(library, library)


def bug_line(claim: str, text: str, script: Path | None, issues: list[KnownIssue]) -> str:
    """Return the line of one bug: its claim, the threads that text and issues name, its script, the checks that see it."""
    parts = [claim]
    links = [issue.link for issue in issues]
    for thread in THREAD.finditer(" ".join([text, *links])):
        link = f"[#{thread[1]}]({thread[0]})"
        if link not in parts:
            parts.append(link)
    if script:
        parts.append(f"[script](upstream/{script.name})")
    checks: list[str] = []
    for issue in issues:
        for check in issue.check:
            if check != "*" and check not in checks:
                checks.append(check)
    if checks:
        others = " and others" if len(checks) > 3 else ""
        parts.append(f"seen by {code(checks[:3])}{others}")
    return f"- {'; '.join(parts)}\n"


def mutants() -> str:
    """Return a list of the bugs that tests/mutants brings back, and where each is seen."""
    from mutants.catalog import MUTANTS
    from mutants.sightings import SIGHTINGS

    lines = []
    for mutant in MUTANTS:
        sights = []
        for sight in SIGHTINGS[mutant.id]:
            sights.append(f"{sight.driver} `{sight.cell}:{sight.check}`")
        pull_requests = [link for link in mutant.upstream if "/pull/" in link]
        fix = (pull_requests or mutant.upstream)[0]
        lines.append(f"- [{mutant.id}]({fix}): {mutant.symptom}. {', '.join(sights)}\n")
    return "".join(lines)


def traincheck() -> str:
    """Return a list of the errors of TrainCheck's paper, and the verdict of each."""
    from mutants.of_traincheck import VERDICTS

    lines = []
    for name, (link, verdict) in VERDICTS.items():
        lines.append(f"- [{name}]({link}): {verdict}\n")
    return "".join(lines)


def strategies() -> str:
    """Return the table of strategies, and of the drivers that support each."""
    rows = []
    for strategy in STRATEGIES.by_name.values():
        drivers = []
        for driver in DRIVERS.by_name.values():
            if supports(driver, strategy.name):
                drivers.append(driver.name)
        rows.append([f"`{strategy.name}`", strategy.meaning, code(drivers)])
    return table(("strategy", "is", "drivers"), rows)


def supports(driver: type[Driver], strategy: str) -> bool:
    """Tell whether the driver supports the strategy in any precision."""
    cells = [Cell(strategy, precision) for precision in PRECISIONS.names()]
    return not all(driver.unsupported_reason(cell, "cuda") for cell in cells)


def precisions() -> str:
    """Return the table of dtypes that each precision loads, computes and stores in."""
    rows = []
    for precision in PRECISIONS.by_name.values():
        compute = precision.compute
        if precision.float8:
            compute = f"8 bits in, {compute} out"
        rows.append([f"`{precision.name}`", precision.load, compute, precision.master])
    return table(("precision", "loaded in", "products in", "masters and optimizer state in"), rows)


def dtypes() -> str:
    """Return the dtype table of bf16_upcast; strategies with equal rows share one."""
    names_by_dtypes: dict[Dtypes, list[str]] = defaultdict(list)
    precision = PRECISIONS.get("bf16_upcast")
    for strategy in STRATEGIES.by_name.values():
        names_by_dtypes[strategy.dtypes(precision)].append(strategy.name)
    rows = []
    for row, names in names_by_dtypes.items():
        dtype_by_column = {column: getattr(row, column) or "" for column in COLUMNS}
        if not dtype_by_column["buffer"]:
            dtype_by_column["buffer"] = "float32"
        rows.append([code(names), *dtype_by_column.values()])
    return table(("strategy", *COLUMNS.values()), rows)


def cell_options() -> str:
    """Return the table of the options of a cell, and of the drivers that support each."""

    def supporting(option: str) -> str:
        names = [driver.name for driver in DRIVERS.by_name.values() if option in driver.options]
        return "all" if len(names) == len(DRIVERS.by_name) else code(names)

    def word(value: OptionValue) -> object:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return value

    rows = []
    for option in OPTIONS.values():
        values = code(word(value) for value in option.values)
        rows.append([f"`{option.name}`", values, option.meaning, supporting(option.name)])
    return table(("option", "values, the default first", "means", "drivers"), rows)


def tasks() -> str:
    """Return the class that the profile ``zoo`` trains for each task of transformers, or why it trains none."""
    rows = []
    for task, kind in of_tasks().items():
        trained = f"`hf:{kind}`" if kind else UNSUPPORTED_TASKS[task]
        rows.append([f"`{task}`", trained])
    return table(("task", "trained, or why none is"), rows)


def left_blank() -> str:
    """Return the architectures that the profile ``zoo`` has no tiny model of, by the reason."""
    names_by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in UNSUPPORTED.items():
        names_by_reason[reason].append(f"hf:{name}")
    rows = [[code(names), reason] for reason, names in names_by_reason.items()]
    return table(("no tiny model of", "why not"), rows)


def can_run(strategy: str, precision: str, chosen: Mapping[str, OptionValue]) -> bool:
    """Tell whether some built-in driver runs a cell with these options, and with those that they need beside them."""
    tokens = [OPTIONS[name].token(value) for name, value in chosen.items()]
    needed: dict[str, OptionValue] = {}
    if chosen.get("sp"):
        needed["tp"] = 2
    if chosen.get("ep"):
        needed["model"] = "moe_deepspeed" if strategy.startswith("zero") else "moe_fused"
    for driver in DRIVERS.by_name.values():
        options = dict(needed)
        for token in (*chosen, *tokens, "+".join(chosen)):
            options.update(driver.needs_options.get(token, {}))
        options.update(chosen)
        cell = Cell.of(strategy, precision, 8, **options)
        if not driver.unsupported_reason(cell, "cuda"):
            return True
    return False


def beside_axes() -> str:
    """Return the table of what no built-in driver supports beside each axis of a mesh."""
    others = [(name, OPTIONS[name].values[1]) for name in AXES]
    others.extend(BESIDE_AXES)

    def row(axis: str) -> list[str]:
        chosen = {axis: OPTIONS[axis].values[1]}
        supported = [name for name in STRATEGIES.names() if can_run(name, "fp32", chosen)]
        strategies = [name for name in STRATEGIES.names() if name not in supported]
        precisions = []
        for precision in PRECISIONS.names():
            if not any(can_run(strategy, precision, chosen) for strategy in supported):
                precisions.append(precision)
        beside = []
        for name, value in others:
            if name in {axis, "model"}:
                continue
            both = {**chosen, name: value}
            if not any(can_run(strategy, "fp32", both) for strategy in supported):
                beside.append(name)
        return [f"`{axis}`", code(strategies), code(precisions), code(beside)]

    return table(("axis", "strategies", "precisions", "axes and options"), map(row, AXES))


#: Methods that a driver need not have.
OPTIONAL = ("export", "reload", "evaluate", "reference", "overflow", "metrics", "exchanges", "again")
#: The method that an action of a run calls, where it has another name; other actions call none, or the method of their name.
CALLED = {"rounded": "reference", "resumed_rows": "rows", "moved_rows": "rows"}


class Able(Driver):
    """A driver that has every optional method but those of ``lacks``, and makes every claim."""

    name = "able"
    reshards = STRATEGIES.names()
    portable: ClassVar[Mapping[str, str]] = {"ddp": "fsdp2", "fsdp2": "ddp"}
    loaders: ClassVar[Mapping[str, Loader]] = {"": Loader(resumes=True, moves=True)}
    extra_state: ClassVar[Mapping[str, ExtraState]] = {"": ExtraState()}
    live_calls: ClassVar[type[Calls]] = Calls
    lacks: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def loads_best(cls, cell: Cell) -> bool:
        return bool(cell)

    @classmethod
    def can(cls, action: str) -> bool:
        return action not in cls.lacks


@dataclass(frozen=True)
class Step:
    """A row of the table of checks that a driver's methods make possible.

    Attributes:
        methods: Methods that one writes together.
        words: Their description; empty for the first line of the first one's docstring.
        without: Attributes of ``Able`` that take the row's checks away; None for methods that every driver has.
        claim: The attribute that claims an ability that is no method.
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
    Step((), CLAIMS["live_calls"], {"live_calls": None}, "live_calls"),
    Step((), CLAIMS["loads_best"], {"loads_best": Driver.loads_best}, "loads_best"),
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


def cell_of(check: Check, driver: type[Driver]) -> str | None:
    """Return the words for the first cell in which the check applies to the driver; None if it does in none."""
    for words, cell in CELLS_OF_CHECKS.items():
        if not check.not_applicable(cell, driver):
            return words
    return None


def shown_cell(check: Check) -> Cell:
    """Return the first cell in which the check applies to a driver that has everything."""
    return CELLS_OF_CHECKS[cell_of(check, Able) or ""]


def needed_actions(check: Check) -> set[str]:
    """Return the actions without which the check fails: those of its runs up to the last snapshot that it reads."""
    last = {run: (action, nth) for run, action, nth in check.until}
    needed: set[str] = set()
    for run in check.runs(shown_cell(check), Able).runs:
        if run.name in check.raises or not check.until:
            needed.update(run.actions)
        elif run.name in last:
            needed.update(actions_until(run, *last[run.name]))
    return needed


def actions_until(run: Run, last: str, nth: int) -> tuple[str, ...]:
    """Return the actions of a run up to the nth one of that name; none if it has no such action."""
    indices = [index for index, action in enumerate(run.actions) if action == last]
    if not indices:
        return ()
    return run.actions[: indices[nth] + 1]


def brought_by(step: Step) -> list[Check]:
    """Return the checks that the methods of a row bring to a driver that has those of all rows above it."""
    if step.without is None:
        last_method = step.methods[-1]
        return [check for check in CHECKS.by_name.values() if last_required_method(check) == last_method]
    lacking = type("Without", (Able,), dict(step.without))
    return [check for check in CHECKS.by_name.values() if applies_only_to_able(check, lacking)]


def applies_only_to_able(check: Check, lacking: type[Driver]) -> bool:
    """Tell whether the check applies in some cell to ``Able``, but not to the driver that lacks something."""
    for cell in CELLS_OF_CHECKS.values():
        if check.not_applicable(cell, lacking) and not check.not_applicable(cell, Able):
            return True
    return False


def last_required_method(check: Check) -> str | None:
    """Return the last method, of those that every driver has, that the check needs; None if it needs more than those."""
    if cell_of(check, Driver) is None:
        return None
    needed = needed_actions(check)
    last = None
    for step in STEPS_OF_A_DRIVER:
        if step.without is None:
            for method in step.methods:
                if method in needed:
                    last = method
    return last


def runs_with(step: Step) -> str:
    """Return the names of the runs in which a method of a row is called."""
    run_names = []
    for check in CHECKS.by_name.values():
        for run in check.runs(shown_cell(check), Able).runs:
            called = {CALLED.get(action, action) for action in run.actions}
            # Some are the run of another cell under a name of their own.
            if called.intersection(step.methods) and not run.same_as:
                run_names.append(run.name)
    if len(set(run_names)) > FEW_RUNS:
        return "all that train"
    return code(run_names)


def actions() -> str:
    """Return the table of the checks that become possible with each method or claim of a driver."""

    def called(name: str) -> str:
        _, *arguments = inspect.signature(getattr(Driver, name)).parameters
        return f"`{name}({', '.join(arguments)})`"

    def first_line(name: str) -> str:
        docstring = inspect.getdoc(getattr(Driver, name)) or ""
        line, _, _ = docstring.partition("\n")
        return prose(line)

    def check_words(check: Check) -> str:
        condition = cell_of(check, Able) or ""
        if check.limit:
            condition = f"with `--distcompat-{check.limit}`"
        return f"`{check.name}` {condition}".strip()

    rows = []
    for step in STEPS_OF_A_DRIVER:
        names = [called(method) for method in step.methods]
        if step.claim:
            names.insert(0, f"`{step.claim}`")
        words = step.words or first_line(step.methods[0])
        checks = [check_words(check) for check in brought_by(step)]
        rows.append([", ".join(names), words, runs_with(step), ", ".join(checks)])
    return table(("method or claim", "is", "runs that call it", "checks that become possible"), rows)


def node_faults() -> str:
    """Return the table of faults of a node, with the seconds after which a session says them under each executor."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))

    def met(name: str, fault: Fault, executor: str) -> str:
        if executor in fault.impossible:
            return fault.impossible[executor]
        seconds = measured["seconds"].get(name, {}).get(executor, "")
        says = "✓"
        if executor in fault.instead:
            says = f"`{fault.instead[executor]}`"
        return f"{says} {seconds}".strip()

    rows = []
    for name, fault in FAULTS.items():
        says = f"`{fault.says}`" if fault.says else "the tests pass"
        limit = str(fault.within or "")
        by_executor = [met(name, fault, executor) for executor in EXECUTORS]
        rows.append([fault.words, says, limit, *by_executor])
    executors = [code([executor]) for executor in EXECUTORS]
    made = table(("n2", "says", "limit", *executors), rows)
    return f"{made}\n`python benchmarks/node_faults.py`: {measured['on']}.\n"


def example_driver() -> str:
    """Return the whole driver of the example."""
    path = DOCS.parent / "examples" / "my_trainer" / "my_driver.py"
    text = path.read_text(encoding="utf-8")
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
    """Return the block of that name, between empty lines: a comment right beside a table would be part of it."""
    return f"\n{MADE[name]().strip()}\n\n"


def write() -> None:
    """Write every block of every page anew."""

    def renewed(block: re.Match[str]) -> str:
        return f"{block[1]}{block[2]}{made(block[1])}"

    for page in sorted(DOCS.glob("*.md")):
        old = page.read_text(encoding="utf-8")
        new = BLOCK.sub(renewed, old)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(page.name)


if __name__ == "__main__":
    write()
