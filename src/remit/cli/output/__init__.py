"""Output formats of commands. May import rich."""
