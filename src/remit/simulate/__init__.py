"""Deterministic simulation of the real components under injected faults."""
