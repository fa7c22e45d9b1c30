"""Placement kernel, filters, scores and preemption, all computed over node columns."""
