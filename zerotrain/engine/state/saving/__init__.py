"""A checkpoint written beside the training."""
