"""The authority: decides operations on its own books and commits them. Never reads a cache."""
