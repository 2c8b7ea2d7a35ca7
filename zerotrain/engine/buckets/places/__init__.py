"""Where a bucket's memory lies: the device, the host, a disk."""
