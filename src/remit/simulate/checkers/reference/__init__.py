"""Independent reference model of a scope, read from rows."""
