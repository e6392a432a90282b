"""Names of pytest's that no document promises. When one of these fails, so does the function that the message names."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.plugin.on_ranks.rank_output import no_terminal
from pytest_distcompat.plugin.on_ranks.session_description import _is_default
from pytest_distcompat.plugin.reporting.representation import represent


def test_the_base_temporary_directory_outside_a_fixture(pytester: pytest.Pytester) -> None:
    factory: Any = getattr(pytester.parseconfigure(), "_tmp_path_factory", None)
    message = "plugin/session.py: session_basetemp() reads config._tmp_path_factory.getbasetemp(), which is gone"
    assert hasattr(factory, "getbasetemp"), message
    assert isinstance(factory.getbasetemp(), Path), message


def test_a_session_without_pytest_main() -> None:
    for name in ("fromdictargs", "_do_configure", "_ensure_unconfigure"):
        assert callable(getattr(pytest.Config, name, None)), (
            f"plugin/on_ranks/rank_session.py: collect() and _collected() call pytest.Config.{name}(), which is gone"
        )
    assert callable(getattr(pytest.Session, "from_config", None)), (
        "plugin/on_ranks/rank_session.py: _collected() calls pytest.Session.from_config(), which is gone"
    )


def test_the_default_of_an_option(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfigure("-k", "some")
    message = "plugin/on_ranks/session_description.py: _is_default() asks Config._parser, which is not what it was"
    assert _is_default(config, "markexpr", config.option.markexpr), message
    assert not _is_default(config, "keyword", "some"), message


def test_the_global_capture_can_be_stopped_and_started(pytester: pytest.Pytester) -> None:
    manager = pytester.parseconfigure().pluginmanager.getplugin("capturemanager")
    for name in ("stop_global_capturing", "start_global_capturing"):
        assert callable(getattr(manager, name, None)), (
            f"plugin/on_ranks/rank_session.py: _collected() and rank_output.py: capturing() call {name}() of the plugin 'capturemanager', which is gone"
        )


def test_a_writer_to_no_terminal(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfigure("-p", "no:terminal")
    no_terminal(config)
    writer = config.get_terminal_writer()
    writer.line("nobody sees it", red=True)
    message = "plugin/on_ranks/rank_output.py: no_terminal() makes a _pytest._io.TerminalWriter, whose _highlight pytest 8 asks for"
    assert writer._highlight("x = 1") == "x = 1", message


def test_the_attributes_of_captured_output() -> None:
    from _pytest import capture

    message = (
        "plugin/on_ranks/rank_output.py: capturing() gives _pytest.capture.FDCapture files by another TemporaryFile"
    )
    assert "TemporaryFile(" in inspect.getsource(capture.FDCaptureBase.__init__), message


def test_the_fault_handler_can_be_set_up_again(pytester: pytest.Pytester) -> None:
    plugin = pytester.parseconfigure().pluginmanager.getplugin("faulthandler")
    for name in ("pytest_configure", "pytest_unconfigure"):
        assert callable(getattr(plugin, name, None)), (
            f"plugin/on_ranks/rank_output.py: fault_handler() calls {name}() of the plugin 'faulthandler', which is gone"
        )


def test_the_words_of_a_strict_xpass(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.xfail(strict=True, reason='r')\ndef test(): pass")
    report = pytester.inline_run().getreports("pytest_runtest_logreport")[1]
    assert report.longrepr == "[XPASS(strict)] r", (
        "plugin/marked/reports.py: phase_of() knows a strict xpass by this text"
    )


def test_a_text_is_represented_as_an_exception_is(pytester: pytest.Pytester) -> None:
    item = pytester.getitem("def test_it(): pass", "test_it")
    report = pytest.TestReport(item.nodeid, item.location, {}, "failed", None, "call")
    represent(report, "in short\n\n  the whole\n", ("helper.py", 4, ""), short="shorter")
    message = "plugin/reporting/representation.py: represent() makes types of _pytest._code, which have changed"
    hook = item.config.hook
    data = hook.pytest_report_to_serializable(config=item.config, report=report)
    travelled = hook.pytest_report_from_serializable(config=item.config, data=json.loads(json.dumps(data)))
    for each_report in (report, travelled):
        assert each_report.longreprtext == str(each_report.longrepr) == "in short\n\n  the whole", message
        longrepr: Any = each_report.longrepr
        assert str(longrepr.reprcrash) == "helper.py:4: shorter", message


def test_a_failure_can_be_removed_from_its_section(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_sessionfinish(session):\n"
        "    first, second = session.config.pluginmanager.getplugin('terminalreporter').stats['failed']\n"
        "    second._pdbshown = True\n    first.longrepr.addsection('more', 'of it')"
    )
    pytester.makepyfile("def test_a(): assert 0\ndef test_b(): assert 0")
    lines = pytester.runpytest_subprocess("-p", "no:xdist").outlines
    message = "plugin/reporting/summary.py: fold_failures() sets _pdbshown and calls addsection, which work no more"
    shown = [line.strip("_ ") for line in lines if line.startswith("____")]
    assert (shown, "of it" in lines) == (["test_a"], True), message
    assert len([line for line in lines if line.startswith("FAILED ")]) == 2, message


def test_fixtures_can_be_torn_down_out_of_turn(pytester: pytest.Pytester) -> None:
    session = pytester.getitem("def test_it(): pass", "test_it").session
    assert callable(getattr(getattr(session, "_setupstate", None), "teardown_exact", None)), (
        "ext/reuse/rank_item.py: _reset_between_items() calls Session._setupstate.teardown_exact(), which is gone"
    )


def test_an_item_knows_the_definitions_of_its_fixtures(pytester: pytest.Pytester) -> None:
    source = "import pytest\n@pytest.fixture\ndef number(): return 5\ndef test_it(number): pass"
    item: Any = pytester.getitem(source, "test_it")
    names = item._fixtureinfo.name2fixturedefs
    assert callable(names["number"][0].func), (
        "plugin/marked/declare.py: _fixture_of_an_object() reads Function._fixtureinfo.name2fixturedefs, which has changed"
    )
