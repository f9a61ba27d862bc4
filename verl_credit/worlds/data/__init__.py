"""`verl-credit prepare`: published question sets in the form that verl reads (docs/data.md)."""
