"""Follows forward and backward through the model, and gathers, frees and reduces buckets there."""
