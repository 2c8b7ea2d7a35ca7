"""A model without its parameters' memory, and how to compute the same values later."""
