"""Does a mode's batch gradient point where the expected reward rises? Measured on sampled groups."""
