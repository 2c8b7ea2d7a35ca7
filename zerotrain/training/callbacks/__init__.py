"""Work of a loop beside its steps."""
