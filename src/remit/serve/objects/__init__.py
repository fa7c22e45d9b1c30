"""Reads, writes, dry runs and watches of objects."""
