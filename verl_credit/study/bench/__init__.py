"""Measures of a turn mode that need no GPU: `verl-credit bench`."""
