"""How a bucket is cut: segments, spans, subtrees, digits of the norm."""
