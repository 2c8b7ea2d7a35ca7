"""The typed schema of what a run is told, and the checks on it, without torch."""
