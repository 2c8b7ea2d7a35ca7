"""What a model must be, and how it is entered."""
