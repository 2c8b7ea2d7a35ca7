"""How ranks end: signals, failures, the first cause."""
