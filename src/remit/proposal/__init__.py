"""What do we want next? Nothing is written here and no clock is read: proposals become claims, and the authority decides."""
