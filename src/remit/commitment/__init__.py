"""What is official: the authority decides claims against its books and writes them. No cache is trusted here."""
