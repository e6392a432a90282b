"""OpenTelemetry spans of a session: the session, its runs and its verdicts, with the device-seconds of each verdict."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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


def with_device_seconds(results: Sequence[Verdict], timeline: Iterable[Mapping[str, Any]]) -> list[Verdict]:
    """Return the verdicts with the seconds of all devices that their items leased, by ``report.session["timeline"]``."""
    seconds: Counter[str] = Counter()
    for entry in timeline:
        seconds[entry["who"]] += (entry["end"] - entry["begin"]) * entry.get("part", 1)
    return [dataclasses.replace(one, device_seconds=round(seconds[one.nodeid], 3)) for one in results]


def send(report: Report) -> str:
    """Send the spans to the collector that the environment names; return what to tell the user, empty if it names none.

    The variables are OpenTelemetry's own. ``TRACEPARENT`` makes a span of the CI job the parent of the session's
    (https://www.w3.org/TR/trace-context/).
    """
    endpoint = next(filter(None, map(os.environ.get, ENDPOINTS)), "")
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    if not endpoint or off:
        return ""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        spans = _spans(report)
    except ImportError as error:
        return f"spans: not sent to {endpoint}: {error}; pip install 'pytest-distcompat[otel]'"
    sent, exporter = 0, OTLPSpanExporter()
    for first in range(0, len(spans), BATCH):
        batch = spans[first : first + BATCH]
        if exporter.export(batch).name != "SUCCESS":
            break
        sent += len(batch)
    exporter.shutdown()  # type: ignore[no-untyped-call]
    return f"spans: {sent} of {len(spans)} sent to {endpoint}"


def _spans(report: Report) -> list[Any]:
    """Return the ended spans: the session; below it each verdict, and below that the runs that it was the first to need."""
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    ended = InMemorySpanExporter()
    session = report.session
    name = os.environ.get("OTEL_SERVICE_NAME", "pytest-distcompat")
    versions = {f"distcompat.version.{package}": version for package, version in session["versions"].items()}
    provider = TracerProvider(resource=Resource.create({"service.name": name, **versions}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(ended))
    tracer = provider.get_tracer("pytest_distcompat")
    start = datetime.fromisoformat(session["began"].replace("Z", "+00:00")).timestamp()

    def record(
        name: str, during: tuple[float, float], context: Any, attributes: Mapping[str, Any], error: str = ""
    ) -> Any:
        times = [int((start + seconds) * 1e9) for seconds in during]
        kept_attributes = {f"distcompat.{key}": value for key, value in attributes.items() if value not in (None, "")}
        span = tracer.start_span(name, context, attributes=kept_attributes, start_time=times[0])
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(times[1])
        return trace.set_span_in_context(span)

    outside = TraceContextTextMapPropagator().extract({"traceparent": os.environ.get("TRACEPARENT", "")})
    red = sum(one.red for one in report.results)
    facts = {key: session.get(key) for key in ("device", "gpu", "world_size", "ending")}
    whole = record("session", (0, session["seconds"]), outside, facts, f"{red} red" if red else "")
    items = {}
    for one in report.results:
        facts = {
            key: getattr(one, key) for key in ("suite", "driver", "cell", "check", "nodeid", "rank", "device_seconds")
        }
        during, error = (one.began, one.began + one.seconds), one.headline if one.red else ""
        items[one.nodeid] = record(f"verdict {one.check}", during, whole, {**facts, "status": one.status.value}, error)
    leases = grouped(((entry["who"], entry["begin"], entry["end"]), entry) for entry in session["timeline"])
    for (who, begin, end), entries in leases.items():
        devices = [entry["device"] for entry in entries]
        # A place is a part of a GPU that runs share.
        parts = sum(entry.get("part", 1) for entry in entries)
        facts = {"nodeid": who, "devices": devices, "device_seconds": round((end - begin) * parts, 3)}
        record("run", (begin, end), items.get(who, whole), facts)
    return list(ended.get_finished_spans())
