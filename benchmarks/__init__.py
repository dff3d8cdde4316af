"""Benchmarks of this checkout; README.md has the protocol."""
