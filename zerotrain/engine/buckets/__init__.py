"""A rank's state of one bucket, in three parts: weights, gradient, update."""
