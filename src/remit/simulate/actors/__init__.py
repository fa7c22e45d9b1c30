"""Simulated users, adversaries, and stand-ins for components that the product does not have yet."""
