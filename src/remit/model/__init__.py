"""The nouns that are exchanged: objects, amounts, claims, verdicts. No I/O, no clock, no chance, no opinion here."""
