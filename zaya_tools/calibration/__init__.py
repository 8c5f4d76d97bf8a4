"""Calibration: what a model's activations are like on real text, gathered block by block for recipes to use."""
