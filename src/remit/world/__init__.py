"""What the outside promises: clock, chance, ids, disk, a thread for blocking work. No decision is taken here."""
