"""Layouts: how checkpoints name and group the tensors of the table."""
