"""Node agent: runs assigned replicas, reports their results, fences itself when cut off.

It starts a process only after its own `start` claim is committed.
"""
