"""Node agent: runs the replicas bound to this node, reports their results, and fences itself when cut off.

The agent starts a process only after its own `start` claim is committed. Processes belong to the keeper (keeper/), which
survives a restart of the agent.
"""
