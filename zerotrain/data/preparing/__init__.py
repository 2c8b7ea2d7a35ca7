"""From text to tokens, once."""
