"""What would happen? The same components in a world of virtual time, where everything that can go wrong does, by seed."""
