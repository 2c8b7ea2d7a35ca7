"""A run from a config: its objects made, and what it has left opened again."""
