"""Benchmarks of the simulator and of in-network aggregation."""
