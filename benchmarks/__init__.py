"""Measurements, each a command: ``python -m benchmarks.NAME --help``. Not part of the package."""
