"""How a bucket is cut: spans, whole tensors, sums of leaves, digits of the norm."""
