"""Options: the command line wins over the ini file and that over the default; nothing wrong is ever passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.all_options import ALL_OPTIONS

from pytest_distcompat import known
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.ext.upstream.known import ISSUES
from pytest_distcompat.plugin.options import setting
from pytest_distcompat.plugin.shard import Shard
from pytest_distcompat.plugin.suite.budget import Budget
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.profiles import all_profiles
from pytest_distcompat.report.document import Report
from pytest_distcompat.strategies import STRATEGIES

#: A file of known issues that is right.
SHIPPED = ISSUES.path

#: An earlier report.
LAST = Path(__file__).parents[1] / "report" / "real.json"

#: A file long enough to be a token.
TOKEN_FILE = str(SHIPPED)

#: Option to a right value for the ini file, one for the command line, and what the latter means.
RIGHT: dict[str, tuple[str, str, Any]] = {
    "distcompat_gpus": ("auto", "0", 0),
    "distcompat_world_size": ("3", "4", 4),
    "distcompat_ranks_per_gpu": ("2", "4", 4),
    "distcompat_strategies": ("ddp", "fsdp2, zero3 fsdp2", ("fsdp2", "zero3")),
    "distcompat_precisions": ("fp32", "bf16_upcast", ("bf16_upcast",)),
    "distcompat_drivers": ("accelerate", "torch", ("torch",)),
    "distcompat_profile": ("full", "smoke", "smoke"),
    "distcompat_simulate": ("8", "1024", 1024),
    "distcompat_budget": ("20m", "90s@7", Budget(90, 7)),
    "distcompat_shard": ("1/2", "2/3", Shard(2, 3)),
    "distcompat_known": (f"{SHIPPED} {SHIPPED}", str(SHIPPED), known.read_file(SHIPPED)),
    "distcompat_throughput": ("0.5", "0.9", 0.9),
    "distcompat_timeout": ("60", "0.5", 0.5),
    "distcompat_warm_timeout": ("60", "0.5", 0.5),
    "distcompat_reuse": ("module", "session", "session"),
    "distcompat_reuse_limit": ("10", "3", 3),
    "distcompat_report": ("a.md", "b.json", (Path("b.json"),)),
    "distcompat_baseline": (str(LAST), str(LAST), Report.read(LAST)),
    "distcompat_reach": ("a.sqlite", "b.sqlite", Path("b.sqlite")),
    "distcompat_nothing_ran": ("fail", "pass", "pass"),
    "distcompat_launcher": ("warm", "torchrun", "torchrun"),
    "distcompat_nodes": ("2", "3", 3),
    "distcompat_worker_nodes": ("1", "2", 2),
    "distcompat_executor": ("slurm", "join", "join"),
    "distcompat_listen": ("10.0.0.1", "10.0.0.2:29500", ("10.0.0.2", 29500)),
    "distcompat_token_file": (TOKEN_FILE, TOKEN_FILE, Path(TOKEN_FILE).read_text(encoding="utf-8").strip()),
    "distcompat_verify": ("5", "12.5", 12.5),
}

#: What is wrong, and what the message must say, after the option's name.
WRONG: list[tuple[str, str, str]] = [
    ("distcompat_gpus", "two", "'two' is not right: expected a whole number of at least 0, or 'auto'."),
    ("distcompat_gpus", "-1", "'-1' is not right: expected a whole number of at least 0, or 'auto'."),
    ("distcompat_gpus", "²", "'²' is not right: expected a whole number of at least 0, or 'auto'."),
    ("distcompat_world_size", "0", "'0' is not right: expected a whole number of at least 1, or 'auto'."),
    ("distcompat_ranks_per_gpu", "0", "'0' is not right: expected a whole number of at least 1, or 'auto'."),
    ("distcompat_strategies", "ddp,fsdp3", "no strategy named 'fsdp3'. Known: " + ", ".join(STRATEGIES.names()) + "."),
    ("distcompat_precisions", "int4", "no precision named 'int4'. Known: " + ", ".join(PRECISIONS.names()) + "."),
    ("distcompat_drivers", "lightning", "no driver named 'lightning'. Known: " + ", ".join(DRIVERS.names()) + "."),
    (
        "distcompat_drivers",
        "no_such_module:Driver",
        "driver 'no_such_module:Driver': No module named 'no_such_module'; install it, or *",
    ),
    ("distcompat_drivers", "pathlib:Driver", "driver 'pathlib:Driver': module 'pathlib' has no attribute 'Driver'"),
    ("distcompat_drivers", "pathlib:Path", "*expected a subclass of pytest_distcompat.Driver"),
    ("distcompat_profile", "quick", f"no such value: 'quick'. Known: {', '.join(all_profiles())}."),
    ("distcompat_budget", "20", "'20' is not right: expected a time and perhaps a seed, as 90s, 20m or 2h@7."),
    ("distcompat_shard", "3/2", "'3/2' is not right: expected one part of several, as 1/3, 2/3 or 3/3."),
    ("distcompat_shard", "0/2", "'0/2' is not right: expected one part of several, as 1/3, 2/3 or 3/3."),
    ("distcompat_shard", "x", "'x' is not right: expected one part of several, as 1/3, 2/3 or 3/3."),
    ("distcompat_known", "no_such.toml", "*no_such.toml*"),
    ("distcompat_throughput", "0", "'0' is not right: expected a number above 0, as 0.9."),
    ("distcompat_throughput", "fast", "'fast' is not right: expected a number above 0, as 0.9."),
    ("distcompat_timeout", "0", "'0' is not right: expected a number of seconds above 0."),
    ("distcompat_timeout", "soon", "'soon' is not right: expected a number of seconds above 0."),
    ("distcompat_timeout", "nan", "'nan' is not right: expected a number of seconds above 0."),
    ("distcompat_warm_timeout", "0", "'0' is not right: expected a number of seconds above 0."),
    ("distcompat_reuse", "class", "no such value: 'class'. Known: never, module, session."),
    ("distcompat_reuse_limit", "0", "'0' is not right: expected a whole number of at least 1."),
    ("distcompat_report", "a.xml", "'a.xml': the suffix says the format. Known: .json, .md, .html, .txt."),
    ("distcompat_report", "no_such_folder/a.md", "'no_such_folder/a.md': there is no directory *no_such_folder."),
    ("distcompat_baseline", "none.json", "*none.json: *No such file*"),
    ("distcompat_reach", "no_such_folder/a.db", "'no_such_folder/a.db': there is no directory *no_such_folder."),
    ("distcompat_nothing_ran", "skip", "no such value: 'skip'. Known: fail, pass."),
    ("distcompat_launcher", "mpirun", "no such value: 'mpirun'. Known: warm, torchrun."),
    ("distcompat_simulate", "-1", "'-1' is not right: expected a whole number of at least 0."),
    ("distcompat_nodes", "0", "'0' is not right: expected a whole number of at least 1."),
    ("distcompat_worker_nodes", "-1", "'-1' is not right: expected a whole number of at least 0."),
    ("distcompat_executor", "pbs", "no executor named 'pbs'. Known: join, local, ray, slurm."),
    (
        "distcompat_listen",
        "host:http",
        "'host:http' is not right: expected HOST or HOST:PORT, with an IPv6 address in *",
    ),
    ("distcompat_listen", "host:99999", "'host:99999' is not right: expected a port from 1 to 65535"),
    ("distcompat_world_size", "99999999999", "'99999999999' is too large: expected at most 1000000."),
    ("distcompat_drivers", ":", "driver ':': expected module:attribute, or one of torch, *"),
    (
        "distcompat_listen",
        "0.0.0.0:1",
        "'0.0.0.0:1' is no address that other nodes can reach: expected that of one interface.",
    ),
    ("distcompat_token_file", "nowhere", "'nowhere': No such file or directory."),
    ("distcompat_verify", "101", "'101' is not right: expected a number from 0 to 100."),
]


def ini(pytester: pytest.Pytester, **values: str) -> None:
    pytester.makeini("\n".join(["[pytest]", *(f"{name} = {value}" for name, value in values.items())]))


def test_every_option_is_tried() -> None:
    assert set(RIGHT) == set(ALL_OPTIONS) == {name for name, _, _ in WRONG}


@pytest.mark.parametrize("name", ALL_OPTIONS)
def test_the_command_line_wins_over_ini_and_ini_over_the_default(name: str, pytester: pytest.Pytester) -> None:
    in_ini, on_line, value = RIGHT[name]
    configured = setting(pytester.parseconfigure(), name)
    assert (configured.text, configured.origin) == (ALL_OPTIONS[name].default, "default")
    ini(pytester, **{name: in_ini})
    configured = setting(pytester.parseconfigure(), name)
    assert (configured.text, configured.origin) == (in_ini, "ini")
    configured = setting(pytester.parseconfigure(f"{ALL_OPTIONS[name].flag}={on_line}"), name)
    assert (configured.value, configured.text, configured.origin) == (value, on_line, "option")


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_a_wrong_value_is_a_usage_error_that_lists_the_right_ones(
    name: str, value: str, message: str, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile("def test(): pass")
    flag = ALL_OPTIONS[name].flag
    result = pytester.runpytest_inprocess(f"{flag}={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {flag}: {message}"])
    ini(pytester, **{name: value})
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: ini {name}: {message}"])


@pytest.mark.parametrize("name", [name for name, option in ALL_OPTIONS.items() if option.default == ""])
def test_an_empty_value_on_the_command_line_wins(name: str, pytester: pytest.Pytester) -> None:
    ini(pytester, **{name: RIGHT[name][0]})
    configured = setting(pytester.parseconfigure(f"{ALL_OPTIONS[name].flag}="), name)
    assert (bool(configured.value), configured.text, configured.origin) == (False, "", "option")


def test_a_shell_variable_that_is_not_set_is_no_number(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("--distcompat-gpus=")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --distcompat-gpus: '' is not right: expected a whole number *, or 'auto'."])


def test_an_unwritable_report_is_a_usage_error(pytester: pytest.Pytester) -> None:
    pytester.mkdir("taken.md")
    result = pytester.runpytest_inprocess("--distcompat-report=taken.md")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --distcompat-report: 'taken.md' is a directory; expected a file."])


@pytest.mark.parametrize("place", ["pytest.ini", "pyproject.toml"])
def test_files_are_relative_to_the_file_that_names_them(
    place: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = pytester.path / "a b"
    below = root / "below"
    below.mkdir(parents=True)
    if place == "pytest.ini":
        (root / "known.toml").write_bytes(SHIPPED.read_bytes())
        lines = ["[pytest]", "distcompat_known = known.toml, known.toml"]
        lines += ["distcompat_baseline = last.json", "distcompat_report = a.md", "    b.json"]
    else:
        lines = [
            "[tool.pytest.ini_options]",
            "distcompat_baseline = 'last.json'",
            'distcompat_report = "a.md\\nb.json"',
        ]
    (root / place).write_text("\n".join(lines), encoding="utf-8")
    (root / "last.json").write_bytes(LAST.read_bytes())
    (below / "test_it.py").write_text("def test(): pass", encoding="utf-8")
    for directory in (root, below):
        monkeypatch.chdir(directory)
        config = pytester.parseconfigure()
        assert setting(config, "distcompat_baseline").value == Report.read(LAST)
        reports = setting(config, "distcompat_report").value
        assert [path.absolute() for path in reports] == [root / "a.md", root / "b.json"]
        if place == "pytest.ini":
            assert setting(config, "distcompat_known").value == known.read_file(SHIPPED) * 2
    config = pytester.parseconfigure("--distcompat-report=c.md")
    assert [path.absolute() for path in setting(config, "distcompat_report").value] == [below / "c.md"]


def test_an_unknown_option_is_a_usage_error(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("--distcompat-gpu-count=3")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*unrecognized arguments: --distcompat-gpu-count=3*"])


def test_the_header_shows_values_and_their_source(pytester: pytest.Pytester) -> None:
    ini(pytester, distcompat_timeout="5", distcompat_world_size="3")
    result = pytester.runpytest_inprocess("--distcompat-gpus=0", "--distcompat-world-size=4")
    result.stdout.fnmatch_lines(
        ["distcompat: gpus 0 (from option), world_size 4 (from option), timeout 5 (from ini); cpu x 4"]
    )


def test_the_header_shows_the_devices_if_there_are_distributed_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.distcompat\ndef test(): pass")
    result = pytester.runpytest_inprocess("--collect-only", "--distcompat-timeout=7")
    result.stdout.fnmatch_lines(
        ["distcompat: CPU, gloo, world size 2 (default), time limit 7 s (option), warm launcher"]
    )


def test_the_help_shows_every_option_and_every_ini_key(pytester: pytest.Pytester) -> None:
    text = pytester.runpytest_inprocess("--help").stdout.str()
    for option in ALL_OPTIONS.values():
        assert option.flag in text
        assert f"{option.name} (string)" in text


def test_a_number_that_a_conftest_has_set(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfig()
    config.option.distcompat_world_size = 3
    assert setting(config, "distcompat_world_size").value == 3


def test_walks_are_selected_by_strategy_alone(pytester: pytest.Pytester) -> None:
    """They are in fp32 all, so that a precision says nothing of them."""
    pytester.makepyfile(
        "from pytest_distcompat import CompatSuite, Matrix\n"
        "class TestIt(CompatSuite):\n    driver = 'torch'\n    matrix = Matrix(('ddp', 'fsdp2'), ('fp32', 'bf16_upcast'))\n"
    )
    flags = ("--distcompat-profile=walk", "--distcompat-precisions=bf16_upcast", "--distcompat-strategies=fsdp2")
    result = pytester.runpytest("--co", "-q", "--distcompat-gpus=0", *flags)
    result.stdout.fnmatch_lines(["*fsdp2-fp32-w2-model_mlp:walk*"])
    result.stdout.no_fnmatch_line("*ddp*")


def test_the_summary_says_how_to_draw_the_same_walks_again(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "from pytest_distcompat.trace import Trace\n"
        "from pytest_distcompat.ext.walk.explore import Explorer\n"
        "def explore(self, examples, seed):\n    print('drawn by', seed)\n    return Trace.of(self.driver, [])\n"
        "Explorer.seed, Explorer.explore = 17, explore\n"
    )
    pytester.makepyfile(
        "from pytest_distcompat import CompatSuite, Matrix\n"
        "class TestIt(CompatSuite):\n    driver = 'accelerate'\n    matrix = Matrix(('ddp',), ('fp32',))\n"
    )
    result = pytester.runpytest_subprocess("--distcompat-profile=walk", "--distcompat-gpus=0", "-rP", "-p", "no:xdist")
    assert result.ret == 0
    again = "distcompat walk --driver accelerate --cell ddp-fp32-w2-model_mlp --seed 17"
    result.stdout.fnmatch_lines(["drawn by 17", f"walks drawn by seed 17, again: {again}"])
