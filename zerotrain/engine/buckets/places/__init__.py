"""Places of a bucket's memory: the device, the host, a disk."""
