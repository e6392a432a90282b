"""OpenTelemetry spans of a session: the session, its runs and its verdicts, with the device-seconds of each verdict."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pytest_distcompat.grouping import grouped
from pytest_distcompat.report.document import Report
from pytest_distcompat.status import Verdict

#: Variables that name a collector
#: (https://opentelemetry.io/docs/languages/sdk-configuration/otlp-exporter/#otel_exporter_otlp_endpoint).
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
#: How many spans one request has: the SDK's own default of a batch.
BATCH = 512


def with_device_seconds(
    results: Sequence[Verdict], timeline: Iterable[Mapping[str, Any]]
) -> list[Verdict]:
    """Return the verdicts with the seconds of all devices that their items leased, by ``report.session["timeline"]``."""
    seconds: Counter[str] = Counter()
    for entry in timeline:
        seconds[entry["who"]] += (entry["end"] - entry["begin"]) * entry.get("part", 1)
    timed = []
    for result in results:
        device_seconds = round(seconds[result.nodeid], 3)
        timed.append(dataclasses.replace(result, device_seconds=device_seconds))
    return timed


def send(report: Report) -> str:
    """Send the spans to the collector that the environment names; return what to tell the user, empty if it names none.

    The variables are OpenTelemetry's own. ``TRACEPARENT`` makes a span of the CI job the parent of the session's
    (https://www.w3.org/TR/trace-context/).
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
        if exporter.export(batch).name != "SUCCESS":
            break
        sent += len(batch)
    exporter.shutdown()  # type: ignore[no-untyped-call]
    return f"spans: {sent} of {len(spans)} sent to {endpoint}"


def _endpoint() -> str:
    """Return the collector that the environment names, empty if it names none."""
    for variable in ENDPOINTS:
        if os.environ.get(variable):
            return os.environ[variable]
    return ""


def _switched_off() -> bool:
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return disabled or os.environ.get("OTEL_TRACES_EXPORTER") == "none"


def _spans(report: Report) -> list[Any]:
    """Return the ended spans: the session; below it each verdict, and below that the runs that it was the first to need."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    session = report.session
    recorder = _Recorder(session)
    job = TraceContextTextMapPropagator().extract(
        {"traceparent": os.environ.get("TRACEPARENT", "")}
    )
    red = sum(result.red for result in report.results)
    session_span = _Span(
        "session",
        begin=0,
        end=session["seconds"],
        attributes={name: session.get(name) for name in ("device", "gpu", "world_size", "ending")},
        error=f"{red} red" if red else "",
    )
    session_context = recorder.record(session_span, job)
    verdict_contexts = {}
    for result in report.results:
        verdict_contexts[result.nodeid] = recorder.record(_verdict_span(result), session_context)
    for nodeid, span in _run_spans(session["timeline"]):
        recorder.record(span, verdict_contexts.get(nodeid, session_context))
    return recorder.ended_spans()


@dataclass(frozen=True)
class _Span:
    """A span as this report has it: times are seconds since the session began; ``error`` is empty for a success."""

    name: str
    begin: float
    end: float
    attributes: Mapping[str, Any]
    error: str = ""


class _Recorder:
    """Spans in memory, of one session.

    Args:
        session: The report's session.
    """

    def __init__(self, session: Mapping[str, Any]) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        attributes = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "pytest-distcompat")}
        for package, version in session["versions"].items():
            attributes[f"distcompat.version.{package}"] = version
        provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._exporter = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._tracer = provider.get_tracer("pytest_distcompat")
        # Before Python 3.11 a final Z is not read.
        self._session_began = datetime.fromisoformat(
            session["began"].replace("Z", "+00:00")
        ).timestamp()

    def record(self, span: _Span, parent: Any) -> Any:
        """Record a span below the one of the context ``parent``; return its own context."""
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
        """Return all that was recorded."""
        return list(self._exporter.get_finished_spans())

    def _nanoseconds(self, seconds: float) -> int:
        """Return the time since 1970 in nanoseconds, of one in seconds since the session began."""
        return int((self._session_began + seconds) * 1e9)


def _verdict_span(result: Verdict) -> _Span:
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


def _run_spans(timeline: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, _Span]]:
    """Yield the node id of the item that needed each run, and the run's span: from all leases of the same time."""
    leases = grouped(((lease["who"], lease["begin"], lease["end"]), lease) for lease in timeline)
    for (nodeid, begin, end), together in leases.items():
        devices = [lease["device"] for lease in together]
        # A place is a part of a GPU that runs share.
        parts = [lease.get("part", 1) for lease in together]
        device_seconds = round((end - begin) * sum(parts), 3)
        attributes = {"nodeid": nodeid, "devices": devices, "device_seconds": device_seconds}
        yield nodeid, _Span("run", begin, end, attributes)
