"""What a plan refuses."""
