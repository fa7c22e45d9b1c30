"""Generated documentation."""
