"""From a launch of verl's trainer (a shell script, overrides, a YAML) to a recipe with turn credit."""
