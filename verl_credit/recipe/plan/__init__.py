"""`verl-credit plan`: memory, FLOPs, seconds and disk of a recipe, from first principles, before anything starts."""
