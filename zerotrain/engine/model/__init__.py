"""Requirements on a model, and its entry points."""
