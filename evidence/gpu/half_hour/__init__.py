"""Half an hour on one GPU: what it runs, and what it makes of the runs' files."""
