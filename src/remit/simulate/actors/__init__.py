"""Randomised actors for roles without a product component yet."""
