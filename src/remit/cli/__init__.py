"""How does one speak to Remit from a shell? Words in, words out: what is true is decided in the rooms below."""
