"""Checks that run before any rank starts."""
