"""SQLite backend."""
