"""Durable files, log files, secrets in memory, artifacts."""
