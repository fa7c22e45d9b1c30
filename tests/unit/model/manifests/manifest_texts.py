"""Beginnings of manifests, to which a test adds a spec."""

from __future__ import annotations

HEAD = "apiVersion: remit/v1\nkind: %s\nmetadata: {name: thing}\nspec:\n"
