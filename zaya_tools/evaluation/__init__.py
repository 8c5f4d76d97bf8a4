"""Measuring what a checkpoint does."""
