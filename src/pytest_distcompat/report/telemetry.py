"""OpenTelemetry spans of a session, its verdicts and its runs, sent to the user's collector.

A *span* is OpenTelemetry's record of an operation: a name, a begin, an end, attributes and a
parent. At the end of a session ``plugin.reporting.results`` calls ``send`` with the report. If the
environment names a collector (``OTEL_EXPORTER_OTLP_ENDPOINT``), these spans are sent::

    session                     the whole session
      verdict names             one check in one cell, an item of a suite
        run                     a process group that the item started, with its devices

The times of runs come from the session's *timeline*, a list with an entry for each *lease* of a
device: which item (``who``) had which ``device`` from ``begin`` to ``end``, in seconds since the
session began. Runs can share a GPU; an entry then has the ``part`` that it had, as 0.5.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pytest_distcompat.report.document import Report
from pytest_distcompat.status import Verdict

#: Variables that name a collector
#: (https://opentelemetry.io/docs/languages/sdk-configuration/otlp-exporter/#otel_exporter_otlp_endpoint).
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
#: How many spans one request has at most: the default of OpenTelemetry's SDK.
BATCH = 512

#: An entry of a session's timeline, the lease of one device:
#: ``{"device": "cpu-0.0", "who": "a.py::TestA::test[ddp-fp32-w2:names]", "begin": 34.3, "end":
#: 41.2}``
_Lease = Mapping[str, Any]


def with_device_seconds(results: Sequence[Verdict], timeline: Iterable[_Lease]) -> list[Verdict]:
    """Return the verdicts with their device-seconds: the time for which their item leased devices.

    Two devices for 3 seconds are 6 device-seconds.

    Args:
        results: The verdicts.
        timeline: The leases of the session, as in ``report.session["timeline"]``.
    """
    seconds: Counter[str] = Counter()
    for entry in timeline:
        length = entry["end"] - entry["begin"]
        seconds[entry["who"]] += length * entry.get("part", 1)
    timed = []
    for result in results:
        device_seconds = round(seconds[result.nodeid], 3)
        timed.append(dataclasses.replace(result, device_seconds=device_seconds))
    return timed


def send(report: Report) -> str:
    """Send the spans to the collector that OpenTelemetry's own environment variables name.

    If ``TRACEPARENT`` is set, the session's span is a child of that span, such as the CI job's
    (https://www.w3.org/TR/trace-context/).

    Returns:
        A line for the user, as ``spans: 12 of 12 sent to http://localhost:4318``; empty if no
        collector is named. If the collector refuses some, it says how many were sent.
    """
    endpoint = _endpoint()
    if not endpoint or _switched_off():
        return ""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        spans = _spans(report)
    except ImportError as error:
        return f"spans: not sent to {endpoint}: {error}; pip install 'pytest-distcompat[otel]'"
    exporter = OTLPSpanExporter()
    sent = 0
    for start in range(0, len(spans), BATCH):
        batch = spans[start : start + BATCH]
        # The collector does not answer: it will not take the rest either.
        if exporter.export(batch).name != "SUCCESS":
            break
        sent += len(batch)
    exporter.shutdown()  # type: ignore[no-untyped-call]
    return f"spans: {sent} of {len(spans)} sent to {endpoint}"


def _endpoint() -> str:
    """Return the URL of the collector, empty if the environment names none."""
    for variable in ENDPOINTS:
        if os.environ.get(variable):
            return os.environ[variable]
    return ""


def _switched_off() -> bool:
    """Tell whether the user has switched OpenTelemetry off by its own environment variables."""
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return disabled or os.environ.get("OTEL_TRACES_EXPORTER") == "none"


def _spans(report: Report) -> list[Any]:
    """Return the spans of a report, ready to be sent.

    The session's span is the root. Its children are the spans of verdicts, and theirs the spans of
    the runs that they started.
    """
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    session = report.session
    recorder = _Recorder(session)
    traceparent = os.environ.get("TRACEPARENT", "")
    job = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
    session_context = recorder.record(_session_span(report), job)
    verdict_contexts = {}
    for result in report.results:
        verdict_span = _verdict_span(result)
        verdict_contexts[result.nodeid] = recorder.record(verdict_span, session_context)
    for nodeid, run_span in _run_spans(session["timeline"]):
        parent = verdict_contexts.get(nodeid, session_context)
        recorder.record(run_span, parent)
    return recorder.ended_spans()


@dataclass(frozen=True)
class _Span:
    """What a span says, before OpenTelemetry's object is made of it.

    Attributes:
        name: Its name, as ``verdict names``.
        begin: When it began, in seconds since the session began.
        end: When it ended, in seconds since the session began.
        attributes: Name to value; ``cell`` becomes the attribute ``distcompat.cell``.
        error: What failed; empty for a success.
    """

    name: str
    begin: float
    end: float
    attributes: Mapping[str, Any]
    error: str = ""


class _Recorder:
    """Makes OpenTelemetry's spans of one session, and keeps them in memory.

    Args:
        session: ``Report.session``, with ``versions`` and ``began``.
    """

    def __init__(self, session: Mapping[str, Any]) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        # The attributes that all spans share.
        attributes = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "pytest-distcompat")}
        for package, version in session["versions"].items():
            attributes[f"distcompat.version.{package}"] = version
        provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._exporter = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._tracer = provider.get_tracer("pytest_distcompat")
        # Python 3.10 does not read a final Z.
        began = session["began"].replace("Z", "+00:00")
        self._session_began = datetime.fromisoformat(began).timestamp()

    def record(self, span: _Span, parent: Any) -> Any:
        """Record a span, and return its context, of which its children are recorded.

        Args:
            span: What the span says.
            parent: The context of its parent.
        """
        from opentelemetry import trace

        attributes = {}
        for name, value in span.attributes.items():
            if value not in (None, ""):
                attributes[f"distcompat.{name}"] = value
        begin = self._nanoseconds(span.begin)
        recorded = self._tracer.start_span(
            span.name, parent, attributes=attributes, start_time=begin
        )
        if span.error:
            recorded.set_status(trace.Status(trace.StatusCode.ERROR, span.error))
        recorded.end(self._nanoseconds(span.end))
        return trace.set_span_in_context(recorded)

    def ended_spans(self) -> list[Any]:
        """Return all spans that were recorded."""
        return list(self._exporter.get_finished_spans())

    def _nanoseconds(self, seconds: float) -> int:
        """Return nanoseconds since 1970 for seconds since the session began."""
        return int((self._session_began + seconds) * 1e9)


def _session_span(report: Report) -> _Span:
    """Return the span of the whole session; its error is how many verdicts are red."""
    session = report.session
    attributes = {}
    for name in ("device", "gpu", "world_size", "ending"):
        attributes[name] = session.get(name)
    red = sum(result.red for result in report.results)
    error = f"{red} red" if red else ""
    return _Span("session", 0, session["seconds"], attributes, error)


def _verdict_span(result: Verdict) -> _Span:
    """Return the span of a verdict; its error is the headline of a red one."""
    attributes = {
        "suite": result.suite,
        "driver": result.driver,
        "cell": result.cell,
        "check": result.check,
        "nodeid": result.nodeid,
        "rank": result.rank,
        "device_seconds": result.device_seconds,
        "status": result.status.name,
    }
    end = result.began + result.seconds
    error = result.headline if result.red else ""
    return _Span(f"verdict {result.check}", result.began, end, attributes, error)


def _run_spans(timeline: Iterable[_Lease]) -> Iterator[tuple[str, _Span]]:
    """Yield the span of each run, with the node id of the item that started it.

    The timeline has an entry for each device of a run. All of them have the same item and times, by
    which they are recognized.
    """
    leases_by_run: dict[_Run, list[_Lease]] = {}
    for lease in timeline:
        run = _Run(lease["who"], lease["begin"], lease["end"])
        leases_by_run.setdefault(run, []).append(lease)
    for run, leases in leases_by_run.items():
        devices = []
        leased_devices = 0
        for lease in leases:
            devices.append(lease["device"])
            # Runs can share a GPU, and then each leases a part of it.
            leased_devices += lease.get("part", 1)
        length = run.end - run.begin
        attributes = {
            "nodeid": run.nodeid,
            "devices": devices,
            "device_seconds": round(length * leased_devices, 3),
        }
        yield run.nodeid, _Span("run", run.begin, run.end, attributes)


@dataclass(frozen=True)
class _Run:
    """What the leases of one run have in common; times are seconds since the session began."""

    nodeid: str
    begin: float
    end: float
