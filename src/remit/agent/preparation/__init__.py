"""Inputs of an attempt: artifacts, root file systems, volumes, secrets and configs, prepared before its process starts."""
