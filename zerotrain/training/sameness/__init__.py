"""What keeps runs and ranks the same: seeds, generators, data."""
