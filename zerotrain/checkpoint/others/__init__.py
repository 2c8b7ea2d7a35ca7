"""Weights in the formats of others."""
