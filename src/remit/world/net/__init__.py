"""Sockets, framed RPC, HTTP server, TLS."""
