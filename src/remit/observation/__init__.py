"""What we believe of a scope, and how old it is: a copy that proves it missed nothing. Nothing is written from here."""
