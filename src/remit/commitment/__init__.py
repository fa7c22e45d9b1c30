"""The authority: decides operations against its own books and commits them. Never reads a cache."""
