"""Load generators and processes of the benchmarks."""
