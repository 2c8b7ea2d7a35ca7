"""Which dtypes compute, travel and are kept; casts; the scale of fp16."""
