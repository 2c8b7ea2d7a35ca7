"""The sources of state: a checkpoint, files of others, a dict of rank 0, and buckets that were cut otherwise."""
