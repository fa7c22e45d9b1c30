"""Where truth is kept: versioned rows, one writer chain, a feed of what changed. No meaning of any row is known here."""
