"""Keeps runs and ranks the same: seeds, generators, data."""
