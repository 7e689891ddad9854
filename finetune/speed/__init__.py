"""Everything that changes how fast the model runs and nothing of what it computes."""
