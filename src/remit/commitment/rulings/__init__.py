"""Rulings: pure acceptance rules, one module per family of claims."""
