"""Remit: a distributed scheduler and control plane; holds the version."""

__version__ = "0.1.0"
