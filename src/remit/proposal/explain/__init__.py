"""Explanations and what-if questions, computed from a view without changing it."""
