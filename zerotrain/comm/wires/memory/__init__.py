"""Ranks of one host read each other's memory."""
