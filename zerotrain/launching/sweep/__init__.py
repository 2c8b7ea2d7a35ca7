"""Many jobs of one command: where each lies, what became of it, and what its user is told meanwhile."""
