"""Placement kernel, filters, scores and preemption, over node columns."""
