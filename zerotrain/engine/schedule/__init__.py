"""Where forward and backward are, and what is gathered, freed and reduced there."""
