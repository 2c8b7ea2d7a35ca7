"""Numbers of a run, measured and written."""
