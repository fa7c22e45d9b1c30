"""Who plays the roles whose components do not exist yet? Randomised actors, each retired when its component arrives."""
