"""The one way to ask an authority: same id over every retry, bounded patience. What is true is decided elsewhere."""
