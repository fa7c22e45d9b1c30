"""Remit: a distributed scheduler and control plane. The rooms are described in ARCHITECTURE.md."""

__version__ = "0.1.0"
