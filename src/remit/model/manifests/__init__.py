"""Manifest reading and validation: bytes in, objects or problems out."""
