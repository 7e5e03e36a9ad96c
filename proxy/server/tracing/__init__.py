"""Traces and metrics by OpenTelemetry's protocol, for those who turn `otel` on. Needs the extra `otel`.

traced.py   the data plane and the flow, with a span around each step
otlp.py     sends spans, and the metrics page as metrics of OpenTelemetry, to a collector
"""
