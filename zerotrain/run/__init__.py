"""A run from a config: its objects made, and trained with."""
