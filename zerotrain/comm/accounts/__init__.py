"""What was sent, in which order, and who waits where."""
