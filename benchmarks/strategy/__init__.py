"""Benchmarks of the cost model and the search."""
