"""Records of collectives: bytes sent, their order, and the place where each rank waits."""
