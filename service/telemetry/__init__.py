"""Traces, metrics and logs of the worker and its delivery process.

propagation  W3C headers in and out: `extract(headers)`, `trace_ids(head, attempt)`
spans        `SendSummary`, `StoreSummary`; `JobSpans(settings).build(…)`: an attempt's spans, pure
sampling     `keep(opened, end, settings)`: which attempts' spans are wanted, pure
tracer       `JobTracer(settings)`: `.ended(opened, end, sends, store)` never waits; `.traceparent(head, attempt)`,
             `.counters()`, `.close(timeout_s)`
metrics      `Metrics(settings)`: the worker's Prometheus families
logs         `configure(settings)`: one line per event, never prompts or outputs
names        every name of the above
"""
