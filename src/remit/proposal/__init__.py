"""Scheduler: turns a view into claims. No I/O and no clock outside scheduler.py."""
