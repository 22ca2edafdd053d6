"""Scoring what models wrote: running generated programs in isolation, and the metrics that do."""
