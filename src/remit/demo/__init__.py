"""Demonstrations: the commands behind `remit demo`."""
