"""What is tried before any rank starts."""
