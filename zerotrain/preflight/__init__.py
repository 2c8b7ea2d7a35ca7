"""What happens before any rank starts: checks of a config, its plan of memory and bytes, and the choice of `auto`."""
