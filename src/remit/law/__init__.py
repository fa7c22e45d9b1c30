"""Pure rules: no clock, no randomness, no I/O."""
