"""Message types of the HTTP API and the agent protocol."""
