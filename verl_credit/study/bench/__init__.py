"""What a turn mode is worth before a GPU hour is spent on it: `verl-credit bench`."""
