"""Keeper: supervisor process that owns child processes and fencing deadlines and outlives its agent.

It is to the agent what containerd-shim is to containerd. It loads as little as possible, so that it stays small and starts
fast.
"""
