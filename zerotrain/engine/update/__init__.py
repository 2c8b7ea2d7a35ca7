"""One optimizer step over all buckets: norm, clipping, skipping, update."""
