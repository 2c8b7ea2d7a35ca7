"""Other places than the device for what a step needs once: host memory, and a disk."""
