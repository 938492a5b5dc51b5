"""Who owns the loop from tasks to updates."""
