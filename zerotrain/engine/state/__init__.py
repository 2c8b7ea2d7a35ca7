"""The state by name, one bucket at a time: out, and into other buckets."""
