"""Tokens in files, cut into windows."""
