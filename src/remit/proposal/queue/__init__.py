"""Scheduling queue: backlog of pending replicas, ordering, fair share and wake-ups."""
