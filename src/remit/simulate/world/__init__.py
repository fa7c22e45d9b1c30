"""Simulated clock, network, disk, store, runner."""
