"""Explanations, events, usage, status and audit."""
