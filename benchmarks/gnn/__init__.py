"""Benchmarks of training on graphs larger than memory."""
