"""The output of a run, opened again: its config, its model and its text, of which nothing runs unasked."""
