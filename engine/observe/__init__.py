"""What an operator sees: metrics in Prometheus' text format, and log lines in JSON.

`instruments` counts, `metrics` names what is counted, `http` serves it, `logs` writes lines.
"""
