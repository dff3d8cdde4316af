"""Benchmarks of local updates with hidden communication."""
