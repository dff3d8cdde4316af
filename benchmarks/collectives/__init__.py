"""Benchmarks of the synthesis and execution of collectives."""
