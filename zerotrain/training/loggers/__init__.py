"""Places that metrics go to."""
