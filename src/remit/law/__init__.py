"""Rules that can be checked with a pencil: no clock, no chance, no I/O. Everybody who needs a rule reads it here."""
