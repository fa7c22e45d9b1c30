"""What commands print. May import rich."""
