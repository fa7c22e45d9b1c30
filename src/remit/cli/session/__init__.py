"""How commands reach a server and find objects."""
