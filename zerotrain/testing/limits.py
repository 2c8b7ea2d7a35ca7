"""How long a test waits for what will come."""

HANG_S = 600.0
"""Until what is waited for counts as hanging, and the test fails: so long that no machine is too slow or too busy for
it. Pytest's own limit for a test, in pyproject.toml, is above it, so that who waits names what hangs."""
