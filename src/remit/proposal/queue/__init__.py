"""Scheduling queue: backlog, ordering, fair share, wake-ups."""
