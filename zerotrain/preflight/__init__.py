"""Checks of a config, its plan of memory and bytes, and the choice of `auto`, before any rank starts."""
