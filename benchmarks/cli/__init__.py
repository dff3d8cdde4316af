"""Benchmarks of what a person types."""
