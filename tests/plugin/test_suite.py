"""A suite before any rank starts: its items, and what is wrong with the class."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.launch.forensics.ending import RankEnd
from pytest_distcompat.profiles import left_out
from pytest_distcompat.strategies import STRATEGIES

if TYPE_CHECKING:
    from tests.plugin.conftest import ApplicableChecks, FakeRanks, Runs

    from pytest_distcompat.driver import Driver

SUITE = """
from pytest_distcompat import CompatSuite, Matrix, fails, refuses

class TestX(CompatSuite):
    driver = "torch"
    matrix = Matrix(strategies=("ddp", "fsdp2"), precisions=("fp32", "bf16_upcast"))
"""


def items(result: pytest.RunResult) -> list[str]:
    return [line.partition("::")[2] for line in result.outlines if "::" in line]


def collect(pytester: pytest.Pytester, *args: str) -> list[str]:
    return items(pytester.runpytest_inprocess("--collect-only", "-q", "-p", "no:randomly", *args))


CELLS = ["ddp-fp32-w2", "ddp-bf16_upcast-w2", "fsdp2-fp32-w2", "fsdp2-bf16_upcast-w2"]
TORCH = DRIVERS.get("torch")
ACCELERATE = DRIVERS.get("accelerate")


def chosen(applicable_checks: ApplicableChecks, driver: type[Driver], cells: list[str]) -> list[str]:
    """Return the items that the default profile has in these cells."""
    applicable = {Cell.parse(cell): applicable_checks(driver, cell) for cell in cells}
    repeated = left_out("default", applicable)
    items = []
    for cell, checks in applicable.items():
        for check in checks:
            if (cell, check) not in repeated:
                items.append(f"{cell}:{check}")
    return items


def items_with(text: str, items: list[str]) -> list[str]:
    return [item for item in items if text in item]


@pytest.mark.parametrize("driver", ["driver = os.environ.get('NOT_SET_HERE', '')", "pass"])
def test_a_suite_without_a_driver_is_an_error(pytester: pytest.Pytester, driver: str) -> None:
    """It was one skipped item, and the session passed."""
    pytester.makepyfile(
        f"import os\nfrom pytest_distcompat import CompatSuite\n\nclass TestForgotten(CompatSuite):\n    {driver}\n"
    )
    result = pytester.runpytest_inprocess("-q")
    result.stdout.fnmatch_lines(
        ["*TestForgotten has no driver (driver = ''): expected module:attribute, or one of torch, *"]
    )
    assert result.ret == pytest.ExitCode.INTERRUPTED


def test_a_base_class_of_suites_needs_no_driver(pytester: pytest.Pytester) -> None:
    with_base = "class TestBase(CompatSuite):\n    pass\n\nclass TestX(TestBase):"
    pytester.makepyfile(SUITE.replace("class TestX(CompatSuite):", with_base))
    collected = collect(pytester)
    assert collected
    for item in collected:
        assert item.startswith("TestX::")


def test_one_item_for_each_check_in_each_cell_that_it_is_about(
    pytester: pytest.Pytester, applicable_checks: ApplicableChecks
) -> None:
    pytester.makepyfile(SUITE)
    assert "units" in applicable_checks(TORCH, "fsdp2-fp32-w2")
    assert "units" not in applicable_checks(TORCH, "ddp-fp32-w2")
    expected = [f"TestX::test[{item}]" for item in chosen(applicable_checks, TORCH, CELLS)]
    assert collect(pytester, "--strict-markers") == expected
    # The default profile does not reshard once more in bfloat16.
    assert items_with(":reshard]", expected) == [
        "TestX::test[ddp-fp32-w2:reshard]",
        "TestX::test[fsdp2-fp32-w2:reshard]",
    ]


def test_a_cell_that_cannot_be_run_is_one_item(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE.replace('"fsdp2"', '"zero1"').replace('"bf16_upcast"', '"bf16_pure"'))
    first_check = CHECKS.names()[0]
    assert items_with("zero1", collect(pytester)) == [
        f"TestX::test[zero1-fp32-w2:{first_check}]",
        f"TestX::test[zero1-bf16_pure-w2:{first_check}]",
    ]


def test_facets_and_checks_select(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    assert collect(pytester, "-k", "fsdp2 and bf16_upcast and names") == ["TestX::test[fsdp2-bf16_upcast-w2:names]"]
    name = "test_facets_and_checks_select.py::TestX::test[ddp-fp32-w2:resume]"
    assert collect(pytester, name) == ["TestX::test[ddp-fp32-w2:resume]"]


def test_a_suite_needs_no_name_and_a_base_class_is_none(
    pytester: pytest.Pytester, applicable_checks: ApplicableChecks
) -> None:
    pytester.makepyfile(
        """
        from pytest_distcompat import CompatSuite, Matrix

        class Base(CompatSuite):
            matrix = Matrix(strategies=("ddp",), precisions=("fp32",))

        class Mine(Base):
            driver = "torch"

            def test_suite_of_mine(self): pass

            def helper(self): pass
        """
    )
    checks = [f"Mine::test[ddp-fp32-w2:{check}]" for check in applicable_checks(TORCH, "ddp-fp32-w2")]
    assert collect(pytester) == [*checks, "Mine::test_suite_of_mine"]


@pytest.mark.parametrize(
    "body",
    [
        "class TestY(TestX):\n    def test(self, distcompat_case): pass",
        "class TestY(TestX):\n    test = None",
        "class Between(CompatSuite):\n    test = None\nclass TestY(Between):\n    driver = 'torch'",
    ],
    ids=["function", "None", "between"],
)
def test_an_override_is_a_collection_error(body: str, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(f"{SUITE}\n{body}")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*TestY overrides 'test'. A standard test is not overridden: *fails(...), refuses(...)*"]
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("expect = (fails('name', reason='x'),)", f"no check named 'name'. Known: {', '.join(CHECKS.names())}."),
        (
            "expect = (fails('names', strategi='ddp', reason='x'),)",
            "*no facet named 'strategi'. Known: strategy, precision, *",
        ),
        (
            "expect = (fails('names', strategy='fsdp3', reason='x'),)",
            f"no strategy named 'fsdp3'. Known: {', '.join(STRATEGIES.names())}.",
        ),
        ("expect = (fails('names', precision='int4', reason='x'),)", "no precision named 'int4'. Known: fp32, *"),
        (
            "expect = (fails('names', state_dict='half', reason='x'),)",
            "*state_dict has no value 'half'. Known: 'sharded', 'full'",
        ),
        (
            "expect = (fails('names', strategy='fsdp1', reason='x'),)",
            "TestY.expect: fails('names', strategy='fsdp1', *) covers no cell of the matrix (torch)",
        ),
        (
            "matrix = Matrix(world_sizes=(2, 4)); expect = (refuses(match='x', world_size=8),)",
            "TestY.expect: refuses('[*]', world_size=8, *) covers no cell of the matrix (torch)",
        ),
        ("expect = fails('names', reason='x')", "TestY.expect is Expectation(*); expected a tuple"),
        ("expect = ('names',)", "TestY.expect holds 'names'; expected fails(...) or refuses(...)"),
        ("matrix = Matrix(strategies=('fsdp3',))", "no strategy named 'fsdp3'. Known: *"),
        ("matrix = Matrix(precisions=('int4',))", "no precision named 'int4'. Known: *"),
        ("matrix = ('ddp',)", "TestY.matrix is ('ddp',); expected a Matrix"),
        ("driver = 'lightning'", f"no driver named 'lightning'. Known: {', '.join(DRIVERS.names())}."),
        (
            "driver = 'no_such_module:Driver'",
            "driver 'no_such_module:Driver': No module named 'no_such_module'; install it, or *",
        ),
        ("driver = 'pathlib:Path'", "driver 'pathlib:Path' is *; expected a subclass of pytest_distcompat.Driver"),
        ("driver = Matrix", "TestY.driver is *; expected a str"),
        ("expects = (fails('names', reason='x'),)", "TestY.expects is no attribute of a suite; did you mean expect?"),
        ("matrx = Matrix(strategies=('fsdp2',))", "TestY.matrx is no attribute of a suite; did you mean matrix?"),
        ("drivers = ('accelerate',)", "TestY.drivers is no attribute of a suite; did you mean driver?"),
        (
            "strategies = ('fsdp2',)",
            "TestY.strategies is no attribute of a suite; expected matrix = Matrix(strategies=('fsdp2',))",
        ),
    ],
)
def test_a_mistake_is_a_collection_error_that_lists_what_is_right(
    body: str, message: str, pytester: pytest.Pytester, ranks: FakeRanks
) -> None:
    pytester.makepyfile(f"{SUITE}\nclass TestY(TestX):\n    {body}")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines([f"*{message}"])
    assert not ranks.requests


def test_a_misspelt_driver_is_no_base_class(pytester: pytest.Pytester) -> None:
    """A suite without a driver is one between, of which nothing is collected."""
    pytester.makepyfile("from pytest_distcompat import CompatSuite\nclass Mine(CompatSuite):\n    drivr = 'torch'")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*Mine.drivr is no attribute of a suite; did you mean driver?"])


def test_a_suite_has_attributes_of_its_own(pytester: pytest.Pytester, applicable_checks: ApplicableChecks) -> None:
    own = "expected = {'loss': 2.0}\n    drivers = 3\n    options = {'a': 1}\n    matrix_of = ('names',)\n    def expects(self): pass"
    pytester.makepyfile(f"{SUITE}\n    {own}")
    assert len(collect(pytester)) == len(chosen(applicable_checks, TORCH, CELLS))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return True", "returned True; expected the reason as one sentence, None if the driver supports the cell"),
        ("raise KeyError('x')", "raised KeyError: 'x'"),
    ],
)
def test_a_reason_that_is_no_text_is_a_collection_error(body: str, expected: str, pytester: pytest.Pytester) -> None:
    """pytest ended by an internal error."""
    pytester.makepyfile(
        f"""
        from pytest_distcompat import CompatSuite, Driver, Matrix

        class Mine(Driver):
            @classmethod
            def unsupported_reason(cls, cell, device="cpu"):
                {body}

        class TestX(CompatSuite):
            driver = __name__ + ":Mine"
            matrix = Matrix(strategies=("ddp",), precisions=("fp32",))
        """
    )
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*:Mine': unsupported_reason(ddp-fp32-w2, 'cpu') {expected}"])


@pytest.mark.parametrize("profile", ["pairwise", "full"])
def test_a_reason_that_is_no_text_is_an_error_in_cells_of_a_profile_too(
    profile: str, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        """
        from pytest_distcompat import CompatSuite, Driver, Matrix

        class Mine(Driver):
            options = ("compile",)

            @classmethod
            def unsupported_reason(cls, cell, device="cpu"):
                return True if cell.option("compile") else ""

        class TestX(CompatSuite):
            driver = __name__ + ":Mine"
            matrix = Matrix(strategies=("ddp",), precisions=("fp32",))
        """
    )
    result = pytester.runpytest_inprocess(f"--distcompat-profile={profile}")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*:Mine': unsupported_reason(ddp-fp32-w2-compile*, 'cpu') returned True; expected the reason as one*"]
    )


def test_an_expectation_for_another_world_size_waits_for_another_run(
    pytester: pytest.Pytester, ranks: FakeRanks
) -> None:
    pytester.makepyfile(f"{SUITE}\nclass TestY(TestX):\n    expect = (fails('names', world_size=8, reason='x'),)")
    assert pytester.runpytest_inprocess("--co").ret == pytest.ExitCode.OK


def test_options_narrow_what_runs(pytester: pytest.Pytester, applicable_checks: ApplicableChecks) -> None:
    pytester.makepyfile(SUITE + "\nclass TestY(TestX):\n    driver = 'accelerate'\n")

    def number_of_items(cells: list[str]) -> int:
        by_torch = chosen(applicable_checks, TORCH, cells)
        by_accelerate = chosen(applicable_checks, ACCELERATE, cells)
        return len(by_torch) + len(by_accelerate)

    assert len(collect(pytester)) == number_of_items(CELLS)
    collected = collect(pytester, "--distcompat-strategies=fsdp2")
    assert len(collected) == number_of_items(["fsdp2-fp32-w2", "fsdp2-bf16_upcast-w2"])
    collected = collect(pytester, "--distcompat-precisions=fp32", "--distcompat-strategies=ddp,zero3")
    assert len(collected) == number_of_items(["ddp-fp32-w2"])
    collected = collect(pytester, "--distcompat-drivers=accelerate", "--distcompat-precisions=bf16_upcast")
    expected = chosen(applicable_checks, ACCELERATE, ["ddp-bf16_upcast-w2", "fsdp2-bf16_upcast-w2"])
    assert len(items_with("TestY", collected)) == len(expected)
    # What is left of the other suite says that nothing is.
    assert items_with("TestX", collected) == ["TestX::test[no-cell]"]


def test_narrowing_does_not_make_an_expectation_cover_no_cell(
    pytester: pytest.Pytester, applicable_checks: ApplicableChecks
) -> None:
    pytester.makepyfile(SUITE + "    expect = (fails('names', strategy='fsdp2', reason='x'),)\n")
    left = collect(pytester, "--distcompat-strategies=ddp")
    expected = chosen(applicable_checks, TORCH, ["ddp-fp32-w2", "ddp-bf16_upcast-w2"])
    assert len(left) == len(expected)
    assert len(collect(pytester, "--distcompat-drivers=accelerate")) == 1


def test_checks_share_runs(
    pytester: pytest.Pytester, ranks: FakeRanks, runs: Runs, applicable_checks: ApplicableChecks
) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess("-k", "ddp and fp32 and (active or names or resume or data or parity)")
    ran = []
    for request in ranks.requests:
        ran.append((request.payload["cell"], request.payload["run"]["name"]))
    assert sorted(ran) == [
        ("ddp-fp32-w1", "reference"),
        ("ddp-fp32-w2", "resume"),
        ("ddp-fp32-w2", "train"),
    ]
    result.stdout.fnmatch_lines(["5 verdicts from 3 runs"])
    ranks.requests.clear()
    result = pytester.runpytest_inprocess("-k", "fp32")
    expected_runs = runs(TORCH, "ddp-fp32-w2", "fsdp2-fp32-w2")
    of_ddp = applicable_checks(TORCH, "ddp-fp32-w2")
    of_fsdp2 = applicable_checks(TORCH, "fsdp2-fp32-w2")
    verdicts = len(of_ddp) + len(of_fsdp2)
    assert len(ranks.requests) == expected_runs
    assert expected_runs < verdicts
    result.stdout.fnmatch_lines([f"{verdicts} verdicts from {expected_runs} runs"])


def test_the_fork_server_gets_what_the_chosen_driver_and_models_need(
    pytester: pytest.Pytester, ranks: FakeRanks
) -> None:
    pytester.makepyfile(SUITE + "\nclass TestY(TestX):\n    driver = 'accelerate'\n")
    pytester.runpytest_inprocess("--distcompat-drivers=torch", "-k", "ddp and fp32 and names")
    assert ranks.warmth is not None
    assert set(DRIVERS.get("torch").preload) <= set(ranks.warmth.modules)
    assert not {"accelerate", "deepspeed"} & set(ranks.warmth.modules)
    assert not ranks.warmth.call  # no marked test: no pytest session in the fork server


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (RankEnd(1, "killed", "SIGKILL"), "RunFailedError"),
        (RankEnd(1, "raised", "ValueError: no", text="ValueError: no"), "Incompatible"),
    ],
)
def test_the_exception_class_separates_findings_from_failed_runs(
    end: RankEnd, kind: str, pytester: pytest.Pytester, ranks: FakeRanks
) -> None:
    ending = ranks.ending((RankEnd(0, "done"), ()), (end, ()))
    ranks.answer = lambda request: ending
    pytester.makeconftest(
        """
        import pytest

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(item, call):
            if call.excinfo is not None:
                print("raised", [kind.__name__ for kind in call.excinfo.type.__mro__])
            return (yield)
        """
    )
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess("-s", "-k", "ddp and fp32 and names")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*raised *'{kind}', 'DistcompatError'*"])


def test_a_smoke_run_has_costly_checks_once_with_a_reason(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    collected = collect(pytester, "--distcompat-profile=smoke")
    assert items_with(":reshard]", collected) == ["TestX::test[fsdp2-bf16_upcast-w2:reshard]"]
    assert items_with(":paths]", collected) == ["TestX::test[ddp-fp32-w2:paths]"]
    assert len(items_with(":resume]", collected)) == 2


@pytest.mark.parametrize(
    ("profile", "more", "line"),
    [
        ("smoke", [], "profile smoke leaves out 2 of the 4 cells of TestX's matrix that can run here "),
        # That one is not in the matrix either.
        ("walk", [], "profile walk leaves out 4 of the 4 cells of TestX's matrix that can run here "),
        ("smoke", ["--distcompat-strategies=ddp"], "profile smoke leaves out 1 of the 2 cells of TestX's matrix "),
        ("default", [], ""),
        ("full", [], ""),
    ],
)
@pytest.mark.usefixtures("ranks")
def test_a_profile_says_which_part_of_the_suites_own_matrix_it_leaves_out(
    profile: str, more: list[str], line: str, pytester: pytest.Pytester
) -> None:
    # Plain torch has no ZeRO, so those cells are left out by nobody.
    pytester.makepyfile(SUITE.replace('"fsdp2")', '"fsdp2", "zero2")'))
    # One verdict, or there would be no section.
    result = pytester.runpytest_inprocess(
        f"--distcompat-profile={profile}", "-k", "ddp and not compile", "--maxfail=1", *more
    )
    lines = [text for text in result.outlines if " leaves out " in text]
    if line:
        (text,) = lines
        assert text.startswith(line)
        assert text.endswith("(--distcompat-profile default runs them)")
    else:
        assert lines == []


@pytest.mark.parametrize(
    ("driver", "cell", "library", "reason"),
    [
        ("accelerate", "zero2-fp32-w2", "deepspeed", "deepspeed is not installed"),
        ("accelerate", "fsdp2-fp32-w2", "deepspeed", ""),
        ("trainer", "ddp-fp32-w2", "accelerate", "accelerate is not installed"),
        ("torch", "ddp-fp32-w2", "transformers", "transformers is not installed"),
        ("torch", "ddp-fp32-w2-model_mlp", "transformers", ""),
        ("torch", "ddp-fp32-w2-lora", "peft", "peft is not installed"),
    ],
)
def test_a_missing_package_is_a_reason(
    driver: str, cell: str, library: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec

    def without_library(name: str, package: str | None = None) -> Any:
        if name == library:
            return None
        return find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_library)
    assert unsupported_reason(driver, cell) == reason


def unsupported_reason(driver: str, cell: str) -> str:
    """Return the reason of the driver of that name; empty if it can run the cell."""
    return DRIVERS.get(driver).unsupported_reason(Cell.parse(cell), "cpu") or ""


@pytest.mark.parametrize(
    ("driver", "cell", "reason"),
    [
        ("torch", "fsdp2-bf16_upcast-w2-reduce_dtype_fp32", ""),
        ("torch", "ddp-bf16_upcast-w2-reduce_dtype_fp32", "gradients travel in the dtype that they are stored in"),
        (
            "deepspeed",
            "zero2-fp32-w2-reduce_dtype_fp32",
            "fp32 has one dtype for products and optimizer, in which gradients travel",
        ),
        (
            "trainer",
            "fsdp2-bf16_upcast-w2-reduce_dtype_fp32",
            "TrainingArguments have no word for FSDP's policy of dtypes",
        ),
        ("trainer", "zero2-bf16_upcast-w2-reduce_dtype_fp32", ""),
    ],
)
def test_cells_that_support_reduce_dtype(driver: str, cell: str, reason: str) -> None:
    assert unsupported_reason(driver, cell) == reason


def test_the_reproduce_command_selects_the_cells_that_decide_where_a_check_runs(
    pytester: pytest.Pytester, ranks: FakeRanks
) -> None:
    pytester.makepyfile(SUITE)
    narrowed = "--distcompat-precisions=bf16_upcast"
    pytester.runpytest_inprocess(narrowed, "-k", "ddp and reshard", "--distcompat-report=report.json")
    (result,) = json.loads((pytester.path / "report.json").read_text())["results"]
    assert result["cell"] == "ddp-bf16_upcast-w2"
    assert narrowed in result["reproduce"]
