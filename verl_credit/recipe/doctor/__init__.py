"""`verl-credit doctor`: is this machine, and what a recipe asks of it, ready? Every check is a small function."""
