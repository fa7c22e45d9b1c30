"""Explanations and what-if questions over a view."""
