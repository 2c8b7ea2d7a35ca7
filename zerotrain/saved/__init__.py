"""What a run has left, opened again: its config, its model and its text, of which nothing is run unasked."""
