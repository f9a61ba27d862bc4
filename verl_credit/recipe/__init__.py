"""A recipe: composed by Hydra, completed, checked, and what in it has no effect."""
