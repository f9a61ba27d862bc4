"""Published question sets as verl reads them: `verl-credit prepare` (docs/data.md)."""
