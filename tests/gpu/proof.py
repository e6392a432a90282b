"""Stages of the GPU run, in the order of their value: ``run.sh`` installs their packages and starts this.

Each stage is a command that users have too: ``pytest tests/gpu``, the built-in suite, the scripts in ``benchmarks``. With
``--cpu`` the same commands run on the CPU with tiny models, to find what is wrong with them before a GPU waits.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from stages import Command, Outcome, Runner, Stage, take  # type: ignore[import-not-found] # noqa: E402 - lies beside this

BENCHMARKS = ROOT / "benchmarks"
DRIVERS = ("torch", "accelerate", "trainer", "deepspeed")
#: What the versions of are written down.
PACKAGES = (
    *("torch", "triton", "transformers", "accelerate", "deepspeed", "torchao", "peft", "numpy", "safetensors"),
    *("pytest", "pytest-xdist", "nvidia-ml-py", "pytest-distcompat"),
)
#: Statuses of a check that are no news.
EXPECTED = {"passed", "known", "refused", "skipped"}
#: How many lines of a finding are kept.
LINES = 12
#: From how many cores on the four drivers are tested at the same time on one GPU.
CORES_FOR_ALL_DRIVERS = 8
#: How many workers run ``test_suite.py`` then.
SUITE_WORKERS = 4
#: The stages of the built-in suite.
SUITES = ("smoke", "shared", "default")


@dataclass(frozen=True)
class Expected:
    """How long a stage is expected to take: on a GPU with 16 cores, and with ``--cpu`` on 2 cores, in seconds."""

    gpu: float
    cpu: float


#: By the name of the stage up to its first hyphen, or the whole name.
SECONDS = {
    "facts": Expected(30, 20),
    "gpu-marked": Expected(100, 5),
    "gpu-leases": Expected(30, 5),
    "gpu-suite": Expected(90, 5),
    "smoke": Expected(70, 25),
    "shared": Expected(70, 25),
    "groups": Expected(90, 50),
    "default": Expected(90, 25),
    "throughput": Expected(60, 10),
    "convergence": Expected(60, 50),
}


def facts(_work: Path, result: Path) -> list[str]:
    """Return the command that writes down the machine."""
    return [sys.executable, __file__, "--facts", str(result)]


def write_facts(result: Path) -> None:
    """Write down the machine: card, driver, versions, and what ``distcompat doctor`` says."""

    def output(*command: str) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return repr(error)
        return done.stdout + done.stderr

    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    query = "name,driver_version,memory.total,compute_mode,mig.mode.current,persistence_mode,power.limit"
    facts: dict[str, Any] = {
        "card": output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader").strip(),
        "nvidia-smi": output("nvidia-smi"),
        "doctor": output("distcompat", "doctor", "--all"),
        "pip check": output(sys.executable, "-m", "pip", "check"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in PACKAGES},
    }
    import torch

    facts["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["device"] = str(properties)
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        facts["bf16 product, TFLOP/s"] = _product()
    result.write_text(json.dumps(facts), encoding="utf-8")
    print(json.dumps(facts, indent=1))


def _product(size: int = 8192, times: int = 20) -> float:
    """Return how fast the card multiplies bfloat16 matrices of random numbers: the ceiling for what follows."""
    import torch

    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        left @ right
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        left @ right
    torch.cuda.synchronize()
    return 2 * size**3 * times / (time.perf_counter() - began) / 1e12


def gpu_tests(file: str, workers: int = 0) -> Command:
    """Make the command for a file of ``tests/gpu``, run by so many workers of xdist; 0: by pytest itself."""

    def command(_work: Path, result: Path) -> list[str]:
        # pytest-benchmark warns beside xdist, and warnings of pytest are errors here.
        options = ["-p", "no:benchmark", "-p", "no:cacheprovider", "-rA", f"--junitxml={result}", f"--rootdir={ROOT}"]
        if workers:
            options += ["-n", str(workers)]
        return [sys.executable, "-m", "pytest", *options, str(ROOT / "tests" / "gpu" / file)]

    return command


def read_junit(path: Path) -> dict[str, Any]:
    """Return how many tests ended how, and what the others said."""
    count: Counter[str] = Counter()
    findings = {}
    for case in ET.parse(path).iter("testcase"):
        children = {child.tag: child for child in case}
        status = next((tag for tag in ("failure", "error", "skipped") if tag in children), "passed")
        count[status] += 1
        if status != "passed":
            message = children[status].get("message", "") + "\n" + (children[status].text or "")
            findings[case.get("name", "")] = f"{status}: " + _shortened(message, last=True)
    return {"count": dict(count), "findings": findings}


def suite(driver: str, *args: str, earlier: str = "") -> Command:
    """Make the command for the built-in suite of a driver.

    Items that have a result already, from stages of this driver whose name begins with ``earlier``, are left out: what was cut
    off goes on, and the larger profile does not repeat the smaller one.
    """

    def command(work: Path, result: Path) -> list[str]:
        done = list(_finished(work, driver, earlier.split()))
        listed = result.with_suffix(".deselected")
        listed.write_text("\n".join(f"--deselect={nodeid}" for nodeid in done), encoding="utf-8")
        left_out = [f"@{listed}"] if done else []
        return [*_built_in_suite(result), f"--distcompat-drivers={driver}", *left_out, *args]

    return command


def every_driver(*args: str) -> Command:
    """Make the command for the built-in suite of all drivers, in one session."""

    def command(_work: Path, result: Path) -> list[str]:
        return [*_built_in_suite(result), *args]

    return command


def _built_in_suite(result: Path) -> list[str]:
    """Return the beginning of a command that runs the built-in suite and writes its report there."""
    # Below the package's own directory node ids are the same on every machine.
    options = [f"--distcompat-report={result}", f"--rootdir={_installed_in()}", "-q", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", "--pyargs", "pytest_distcompat.suite", *options]


def _installed_in() -> Path:
    spec = importlib.util.find_spec("pytest_distcompat")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def _finished(work: Path, driver: str, stages: Sequence[str]) -> Iterator[str]:
    for stage in stages:
        for path in sorted(work.glob(f"{stage}-{driver}.*.json")):
            for load in json.loads(path.read_text(encoding="utf-8"))["results"]:
                yield load["nodeid"]


def read_report(path: Path) -> dict[str, Any]:
    """Return how many checks ended how, what was not expected, and what runs cost."""
    document = json.loads(path.read_text(encoding="utf-8"))
    results = document["results"]
    return {
        "device": document["session"]["device"],
        "count": dict(Counter(result["status"] for result in results)),
        "seconds": sum(result["seconds"] for result in results),
        "findings": {
            f"{result['driver']} {result['cell']}:{result['check']}": f"{result['status']}: "
            + _shortened(result["message"])
            for result in results
            if result["status"] not in EXPECTED
        },
        "known": sorted({f"{result['cell']}:{result['check']}" for result in results if result["status"] == "known"}),
    }


def _shortened(message: str, *, last: bool = False) -> str:
    lines = message.strip().splitlines()
    return "\n".join(lines[-LINES:] if last else lines[:LINES])


def script(name: str, *args: str, picture: Path | None = None) -> Command:
    """Make the command for one of ``benchmarks``."""

    def command(_work: Path, result: Path) -> list[str]:
        drawn = ["--svg", str(picture)] if picture else []
        return [sys.executable, str(BENCHMARKS / name), *args, "--json", str(result), *drawn]

    return command


def expected_seconds(name: str, *, cpu: bool) -> float:
    """Return how long the stage of that name is expected to take."""
    kind = name if name in SECONDS else name.partition("-")[0]
    expected = SECONDS[kind]
    return expected.cpu if cpu else expected.gpu


def suite_options(name: str, *, cpu: bool) -> list[str]:
    """Return the options of two ranks that share the GPU, in the smoke or in the default profile."""
    options = ["--distcompat-world-size=2", "--distcompat-timeout=120"]
    if name != "default":
        options.append("--distcompat-profile=smoke")
    if cpu:
        # One check of few cells: everything else is what CI does.
        precision = "bf16_upcast" if name == "default" else "fp32"
        cells = f"ddp-{precision}-w2: or zero0-{precision}-w2:"
        return [*options, "--distcompat-gpus=0", "-k", f"({cells}) and active"]
    # Two runs of two ranks at a time.
    return [*options, "--distcompat-gpus=1", "--distcompat-ranks-per-gpu=4", "-n2"]


def smoke_options(*, cpu: bool) -> list[str]:
    """Return the options of the smoke profile on one rank, by eight workers that share the GPU."""
    options = ["--distcompat-world-size=1", "--distcompat-profile=smoke", "--distcompat-timeout=120"]
    if cpu:
        return [*options, "--distcompat-gpus=0", "-n2", "-k", "(ddp-fp32-w1: or zero0-fp32-w1:) and active"]
    return [*options, "--distcompat-gpus=1", "--distcompat-ranks-per-gpu=8", "-n8"]


def suite_stages(name: str, beside: str, *, earlier: str, cpu: bool) -> list[Stage]:
    """Return the stages of one of ``SUITES``, one for each driver."""
    options = suite_options(name, cpu=cpu)
    return [
        Stage(
            f"{name}-{driver}",
            suite(driver, *options, earlier=earlier),
            expected_seconds(name, cpu=cpu),
            resumes=True,
            nothing_left=5,
            read=read_report,
            beside=beside,
        )
        for driver in DRIVERS
    ]


def stages(output: Path, *, cpu: bool) -> list[Stage]:
    """Return all stages, most valuable first."""
    device = ["--device", "cpu"] if cpu else ["--device", "cuda"]
    model = ["--model", "tiny", "--batch", "2", "--sequences", "32", "64", "--steps", "2"] if cpu else []
    tiny = [
        "--model",
        "bytes_tiny",
        "--batch",
        "2",
        "--sequence",
        "32",
        "--steps",
        "20",
        "--back-ends",
        "fsdp2",
        "zero3",
    ]
    curves = tiny if cpu else ["--jobs", "4"]
    # On the CPU others have nothing to show: each of theirs starts Python and torch anew.
    rounds = ["--rounds", "1", "--ours"] if cpu else ["--rounds", "1", "--stack"]
    picture = output / "convergence.svg"
    together = not cpu and (os.cpu_count() or 1) >= CORES_FOR_ALL_DRIVERS
    beside = {name: name if together else "" for name in SUITES}

    def seconds(name: str) -> float:
        return expected_seconds(name, cpu=cpu)

    def throughput(back_end: str, upcast: bool) -> Stage:
        name = f"throughput-{back_end}-{'upcast' if upcast else 'pure'}"
        switch = "--upcast" if upcast else "--no-upcast"
        command = script("throughput.py", "--back-end", back_end, switch, *device, *model)
        return Stage(name, command, seconds(name), limit=180)

    def gpu_file(name: str, beside: str = "", workers: int = 0) -> Stage:
        command = gpu_tests(f"test_{name.removeprefix('gpu-')}.py", workers)
        return Stage(name, command, seconds(name), read=read_junit, beside=beside)

    return [
        Stage("facts", facts, seconds("facts"), limit=180),
        # These two measure the memory of the GPU, and so run alone.
        gpu_file("gpu-marked"),
        gpu_file("gpu-leases"),
        # Its sessions wait for each other's GPU, but start side by side.
        Stage("smoke", every_driver(*smoke_options(cpu=cpu)), seconds("smoke"), read=read_report),
        gpu_file("gpu-suite", beside["shared"], workers=SUITE_WORKERS if together else 0),
        *suite_stages("shared", beside["shared"], earlier="shared", cpu=cpu),
        # Stopped at the limit, it keeps the figures that it has.
        Stage("groups", script("launch.py", *device, *rounds), seconds("groups"), limit=150),
        *suite_stages("default", beside["default"], earlier="shared default", cpu=cpu),
        throughput("fsdp2", upcast=True),
        throughput("zero3", upcast=True),
        throughput("ddp", upcast=False),
        throughput("fsdp2", upcast=False),
        throughput("zero3", upcast=False),
        throughput("ddp", upcast=True),
        Stage("convergence", script("convergence.py", *device, *curves, picture=picture), seconds("convergence")),
    ]


def plan(every: Sequence[Stage], outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return the lines of ``--list``: each stage in order, its expected seconds, and what became of it."""
    lines = []
    total_seconds = 0.0
    longest: dict[str, float] = {}
    for stage in every:
        together = f", beside others of {stage.beside}" if stage.beside else ""
        status = outcomes.get(stage.name, Outcome("not yet")).status
        lines.append(f"{stage.name}: about {stage.seconds:.0f} s{together}, {status}")
        if stage.beside:
            longest[stage.beside] = max(stage.seconds, longest.get(stage.beside, 0.0))
        else:
            total_seconds += stage.seconds
    total_seconds += sum(longest.values())
    return [*lines, f"{len(every)} stages, about {total_seconds:.0f} s"]


def totals(outcomes: dict[str, Outcome], work: Path) -> dict[str, Any]:
    """Return what the suites found together, cut off or not."""
    findings: dict[str, str] = {}
    count: Counter[str] = Counter()
    for name in outcomes:
        for path in sorted(work.glob(f"{name}.*.json")) if name.partition("-")[0] in SUITES else ():
            try:
                report = read_report(path)
            except (ValueError, KeyError):
                continue
            count.update(report["count"])
            findings |= {f"{name}: {item}": message for item, message in report["findings"].items()}
    return {"count": dict(count), "findings": findings}


def markdown(outcomes: dict[str, Outcome], waiting: Sequence[str], suites: dict[str, Any]) -> str:
    """Return the summary for people."""
    lines = ["# GPU runs", ""]
    machine = outcomes["facts"].result if "facts" in outcomes else None
    if machine and "versions" in machine:
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        card = machine["card"] if machine.get("device") else "no GPU"
        lines += [f"{card}; CUDA {machine['cuda']}, NCCL {machine.get('nccl', 'none')}; {machine['cores']} cores; "]
        lines += [f"Python {machine['python']}, {versions}.", ""]
        if "bf16 product, TFLOP/s" in machine:
            lines += [
                f"A bfloat16 product of random 8192 x 8192 matrices: {machine['bf16 product, TFLOP/s']:.0f} TFLOP/s.",
                "",
            ]
    lines += ["| stage | status | cut off | seconds | what |", "| --- | --- | --- | --- | --- |"]
    for name, outcome in outcomes.items():
        result = outcome.result if isinstance(outcome.result, dict) else {}
        what = ", ".join(f"{number} {status}" for status, number in result.get("count", {}).items())
        lines.append(f"| {name} | {outcome.status} | {outcome.cut_off} | {outcome.seconds:.0f} | {what} |")
    lines += [f"| {name} | not yet | | | |" for name in waiting if name not in outcomes]
    lines += _throughput(outcomes) + _groups(outcomes) + _convergence(outcomes)
    if suites["count"]:
        lines += ["", "## The built-in suite", ""]
        lines += [", ".join(f"{number} {status}" for status, number in suites["count"].items()) + "."]
    findings = dict(suites["findings"])
    for name, outcome in outcomes.items():
        if name.startswith("gpu-") and isinstance(outcome.result, dict):
            findings |= {f"{name}: {item}": message for item, message in outcome.result.get("findings", {}).items()}
    if findings:
        lines += ["", "## Findings", ""]
        for item, message in findings.items():
            lines += [f"- `{item}`", "", *(f"      {line}" for line in message.splitlines()), ""]
    for name, outcome in outcomes.items():
        if outcome.tail and not (isinstance(outcome.result, dict) and outcome.result.get("findings")):
            lines += ["", f"## Output of {name}", "", *(f"    {line}" for line in outcome.tail.splitlines())]
    return "\n".join(lines) + "\n"


def _throughput(outcomes: dict[str, Outcome]) -> list[str]:
    results = [
        outcome.result
        for name, outcome in outcomes.items()
        if name.startswith("throughput-") and isinstance(outcome.result, dict)
    ]
    if not results:
        return []
    columns = "back end | upcast | masters, moments | batch x sequence | seconds a step | tokens/s | MFU | with attention | peak GiB"
    lines = ["", "## Throughput", "", f"| {columns} |", f"| {' | '.join('---' for _ in columns.split('|'))} |"]
    for result in results:
        for row in result.get("rows", ()):
            kinds = f"{result.get('masters', '')}, {result.get('moments', '')}"
            upcast = "yes" if result["upcast"] else "no"
            head = f"| {result['back_end']} | {upcast} | {kinds} | {result['batch']} x {row['sequence']}"
            if "out_of_memory" in row:
                lines.append(f"{head} | out of memory | | | | |")
                continue
            parts = ["" if row[name] is None else f"{row[name]:.1%}" for name in ("mfu", "mfu_attention")]
            figures = (
                f"{row['seconds']:.3f}",
                f"{row['tokens_per_second']:.0f}",
                *parts,
                f"{row['peak_bytes'] / 2**30:.1f}",
            )
            lines.append(f"{head} | {' | '.join(figures)} |")
    return lines


def _groups(outcomes: dict[str, Outcome]) -> list[str]:
    result = outcomes["groups"].result if "groups" in outcomes else None
    if not isinstance(result, dict) or "seconds" not in result:
        return []
    lines = [
        "",
        f"## What a group of {result['ranks']} costs",
        "",
        "| way | seconds a test (median) |",
        "| --- | --- |",
    ]
    # One that was stopped has no figures of the ways that had not run yet.
    measured = {name: seconds for name, seconds in result["seconds"].items() if seconds}
    for name, seconds in measured.items():
        ordered = sorted(seconds)
        lines.append(f"| {name} | {ordered[len(ordered) // 2]:.3f} |")
    return [*lines, *(f"| step of a rank: {name} | {took:.3f} |" for name, took in result["steps"].items())]


def _convergence(outcomes: dict[str, Outcome]) -> list[str]:
    result = outcomes["convergence"].result if "convergence" in outcomes else None
    if not isinstance(result, dict) or "curves" not in result:
        return []
    lines = [
        "",
        f"## Convergence at learning rate {result['rate']:g}",
        "",
        "| back end | upcast | masters | first | last 10 |",
    ]
    lines.append("| --- | --- | --- | --- | --- |")
    for curve in result["curves"]:
        if "error" in curve:
            lines.append(f"| {curve['name']} | {curve['error']} | | | |")
            continue
        last = curve["losses"][-10:]
        figures = f"{curve['losses'][0]:.3f} | {sum(last) / len(last):.3f}"
        lines.append(f"| {curve['back_end']} | {'yes' if curve['upcast'] else 'no'} | {curve['masters']} | {figures} |")
    return lines


def main() -> int:
    """Run what there is time for, and write the summary. Exit code 0: all stages are done, 3: start it again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, nargs="?", help="where results, summary, logs and pictures go")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after so many")
    parser.add_argument("--resume", type=Path, help="the output of an earlier call, from another machine")
    parser.add_argument("--again", nargs="+", default=[], metavar="STAGE", help="run these once more")
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="run these and no others")
    parser.add_argument(
        "--list", action="store_true", help="name the stages, the seconds they take, and what became of them"
    )
    parser.add_argument("--cpu", action="store_true", help="try it all on the CPU, with tiny models")
    parser.add_argument("--began", type=float, default=time.time(), help="when the time began, as time.time says")
    parser.add_argument("--facts", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.facts:
        write_facts(arguments.facts)
        return 0
    if arguments.output is None:
        parser.error("say where the output goes")
    if arguments.cpu:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    output = arguments.output.resolve()
    if arguments.resume:
        take(arguments.resume, output)
    every = stages(output, cpu=arguments.cpu)
    named = {*arguments.only, *arguments.again}
    if unknown := named - {stage.name for stage in every}:
        parser.error(f"no stage {min(unknown)!r}; there are {', '.join(stage.name for stage in every)}")
    chosen = [stage for stage in every if not arguments.only or stage.name in arguments.only]
    with tempfile.TemporaryDirectory(prefix="distcompat-gpu-", ignore_cleanup_errors=True) as work:
        budget_seconds = arguments.minutes * 60
        deadline = time.monotonic() + budget_seconds - (time.time() - arguments.began)
        runner = Runner(chosen, output, Path(work), deadline, budget_seconds)
        runner.forget(arguments.again)
        if arguments.list:
            print("\n".join(plan(every, runner.outcomes)))
            return 0
        done = runner.run()
        ordered = {stage.name: runner.outcomes[stage.name] for stage in every if stage.name in runner.outcomes}
        suites = totals(ordered, Path(work))
        runner.write({"suites": suites})
        (output / "summary.md").write_text(markdown(ordered, runner.open(), suites), encoding="utf-8")
    print((output / "summary.md").read_text(encoding="utf-8"))
    return 0 if done else 3


if __name__ == "__main__":
    sys.exit(main())
