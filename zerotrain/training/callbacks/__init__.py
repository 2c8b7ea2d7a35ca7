"""Work that a loop does beside its steps."""
