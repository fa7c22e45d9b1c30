"""Versioned key-value stores with a fenced writer chain and a watch feed. Knows no kinds."""
