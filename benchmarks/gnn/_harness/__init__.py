"""What the benchmarks of out-of-core training share: workers, limits, probes, faults."""
