"""Command line. Commands hold no rules of their own."""
