"""The sharded engine: buckets with a life, a schedule of what to gather and reduce next, and the facade around them."""
