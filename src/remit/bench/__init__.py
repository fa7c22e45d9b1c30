"""Benchmarks of Remit, next to baselines measured in the same run."""
