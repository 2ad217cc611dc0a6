"""Heads of dense prediction on the features of any model, and inference at full resolution."""
