"""Benchmarks of the mixture-of-experts operator."""
