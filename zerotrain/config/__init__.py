"""What a run is told: a typed schema and the checks on it. Imports no torch."""
