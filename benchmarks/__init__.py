"""Benchmarks and the demo of zcache: ``python -m benchmarks.epochs`` and ``python -m benchmarks.demo``."""
