"""What a rank holds of one bucket, in three parts: weights, gradient, update."""
