"""Types exchanged between components: objects, amounts, claims, verdicts. No I/O."""
