"""Checks of a run from rows, answers and process records. Never imports law or commitment."""
