"""Quantization: recipes say which roles get which scheme, schemes say how numbers are stored, the engine streams."""
