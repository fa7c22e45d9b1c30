"""Endpoints for agents, schedulers and controllers, and connections back to agents."""
