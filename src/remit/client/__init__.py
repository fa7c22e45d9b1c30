"""Clients of an authority and the HTTP API. One operation id per intent, kept over every retry."""
