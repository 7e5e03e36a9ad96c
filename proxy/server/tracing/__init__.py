"""Traces and metrics by OpenTelemetry's protocol, for those who turn `otel` on. Needs the extra `otel`.

traced.py   the spans of a request, most of them made from its record
otlp.py     sends spans, and the metrics page as metrics of OpenTelemetry, to a collector
"""
