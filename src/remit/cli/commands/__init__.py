"""Commands that call a server."""
