"""What do we want next? Claims are prepared here and made true elsewhere: nothing is written, and no clock is read here."""
