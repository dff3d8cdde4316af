"""Benchmarks of plans for a whole cluster."""
