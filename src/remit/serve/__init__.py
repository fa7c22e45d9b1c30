"""Who may ask, over HTTP, and how is it written? Nothing is decided here: what is asked goes to the authority, or is read."""
