"""Keeper: supervisor process that owns child processes and fencing deadlines and outlives its agent."""
