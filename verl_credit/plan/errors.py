"""What a plan refuses."""


class PlanError(ValueError):
    """Names the key, its value and what would be right."""
