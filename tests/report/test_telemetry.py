"""Spans of a session, sent to a collector of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pytest_distcompat.report.document import Report
from pytest_distcompat.report.telemetry import send, with_device_seconds
from pytest_distcompat.status import Status, Verdict

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """A collector of OTLP over HTTP (https://opentelemetry.io/docs/specs/otlp/#otlphttp)."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.code = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(collector.code)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @property
    def spans(self) -> list[Any]:
        """Return all spans that came."""
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    yield collector
    collector.server.shutdown()
    thread.join()
    collector.server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    """Return a span's attributes as plain values."""
    return {
        attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value")) for attribute in span.attributes
    }


def lease(device: str, begin: float, end: float, who: str = "t.py::names", worker: str = "") -> dict[str, Any]:
    """Return an entry of a timeline."""
    return {"device": device, "who": who, "worker": worker, "begin": begin, "end": end, "leak": 0}


def verdict(check: str, began: float, seconds: float, status: Status = Status.PASSED, **more: Any) -> Verdict:
    """Return a verdict of an item."""
    return Verdict(check, "ddp-fp32-w2", status, nodeid=f"t.py::{check}", began=began, seconds=seconds, **more)


REPORT = Report(
    {
        "versions": {"torch": "2.13.0"},
        "device": "cpu",
        "gpu": "",
        "world_size": 2,
        "ending": "finished",
        "began": "2026-11-25T10:00:00Z",
        "seconds": 9.0,
        "timeline": [lease("0", 1, 3), lease("1", 1, 3), lease("0", 4, 5, who="t.py::test_marked")],
    },
    [
        verdict("names", 0.5, 3, device_seconds=4.0),
        verdict("resume", 4, 1, Status.FAILED, message="rank 1: lost\nmore", rank=1),
    ],
)


def test_session_runs_and_verdicts_are_spans(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEPARENT", f"00-{TRACE}-{PARENT}-01")
    assert send(REPORT) == f"spans: 5 of 5 sent to {collector.url}"
    session, names, resume, run, marked = collector.spans
    spans = [session, names, resume, run, marked]
    assert [span.name for span in spans] == ["session", "verdict names", "verdict resume", "run", "run"]
    assert (session.trace_id.hex(), session.parent_span_id.hex()) == (TRACE, PARENT)
    parents = [span.parent_span_id for span in spans[1:]]
    assert parents == [session.span_id, session.span_id, names.span_id, session.span_id]
    assert session.end_time_unix_nano - session.start_time_unix_nano == 9_000_000_000
    began = session.start_time_unix_nano
    assert [(span.start_time_unix_nano - began) / 1e9 for span in spans] == [0, 0.5, 4, 1, 4]
    assert attributes(run)["distcompat.device_seconds"] == 4
    assert [value.string_value for value in attributes(run)["distcompat.devices"].values] == ["0", "1"]
    assert attributes(marked)["distcompat.nodeid"] == "t.py::test_marked"
    values = attributes(resume)
    assert values["distcompat.status"] == "failed"
    assert values["distcompat.rank"] == 1
    assert values["distcompat.check"] == "resume"
    assert [span.status.message for span in spans] == ["1 red", "", "rank 1: lost", "", ""]
    (resource,) = {
        tuple(attributes(resource_span.resource).items()) for resource_span in collector.requests[0].resource_spans
    }
    assert dict(resource)["service.name"] == "pytest-distcompat"
    assert dict(resource)["distcompat.version.torch"] == "2.13.0"


def test_nothing_is_sent_where_no_collector_is_named(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert send(REPORT) == ""
    monkeypatch.delenv("OTEL_TRACES_EXPORTER")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "TRUE")
    assert send(REPORT) == ""
    monkeypatch.delenv("OTEL_SDK_DISABLED")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
    assert send(REPORT) == ""
    assert not collector.requests


def test_a_collector_that_refuses_is_reported(collector: Collector) -> None:
    collector.code = 400
    assert send(REPORT) == f"spans: 0 of 5 sent to {collector.url}"


def test_a_missing_package_is_named(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert send(REPORT).endswith("; pip install 'pytest-distcompat[otel]'")
    assert not collector.requests


def test_device_seconds_are_those_of_the_runs_that_an_item_started() -> None:
    results = [verdict("names", 0, 3), verdict("resume", 3, 2), verdict("export", 0, 6)]
    timeline = [
        lease("0", 1, 2.5, who="t.py::names"),
        lease("1", 1, 2.5, who="t.py::names"),
        lease("0", 3.5, 4, who="t.py::resume"),
        lease("2", 1, 5, who="t.py::export"),
    ]
    assert [result.device_seconds for result in with_device_seconds(results, timeline)] == [
        3,
        0.5,
        4,
    ]


@pytest.mark.spawn
@pytest.mark.parametrize("workers", ["-n0", pytest.param("-n2", marks=pytest.mark.nightly)])
def test_a_session_sends_its_spans(
    collector: Collector, tmp_path: Path, pytester: pytest.Pytester, workers: str
) -> None:
    pytester.makepyfile(
        """
        from pytest_distcompat import CompatSuite, Matrix
        class TestMine(CompatSuite):
            driver = "torch"
            matrix = Matrix(("ddp",), ("fp32",), options=({"model": "mlp"},))
        """
    )
    out = tmp_path / "out.json"
    options = ("-k", "names or memory", "--distcompat-gpus=0", f"--distcompat-report={out}", workers)
    done = pytester.runpytest_subprocess(*options)
    done.stdout.fnmatch_lines(f"*spans: 4 of 4 sent to {collector.url}")
    spans = {span.name: attributes(span) for span in collector.spans}
    assert set(spans) == {"session", "run", "verdict names", "verdict memory"}
    verdicts = {result.check: result for result in Report.read(out).results}
    assert verdicts["names"].device_seconds == spans["run"]["distcompat.device_seconds"] > 0
    assert verdicts["memory"].device_seconds == 0
