"""Traces and metrics by OpenTelemetry's protocol, for those who turn `otel` on. Needs the extra `otel`.

traced.py   the data plane and the flow, with a span around each step
spans.py    names and attributes of the spans
points.py   the metrics page as metrics of OpenTelemetry
otlp.py     sends both to a collector
"""
