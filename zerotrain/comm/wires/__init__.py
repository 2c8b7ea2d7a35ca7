"""How each backend sends."""
