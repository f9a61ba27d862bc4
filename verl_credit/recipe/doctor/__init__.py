"""`verl-credit doctor` checks whether this machine and a recipe's inputs are ready. Every check is a small function."""
