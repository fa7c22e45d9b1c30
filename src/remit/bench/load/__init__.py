"""Load generators and child processes of the benchmarks."""
