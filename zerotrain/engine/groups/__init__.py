"""Which parameters are updated with what, and by which optimizer."""
