"""Scheduler: turns a view of the cluster into claims. No I/O and no clock outside scheduler.py."""
