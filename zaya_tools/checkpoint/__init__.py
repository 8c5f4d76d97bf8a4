"""Reading, planning and writing checkpoints."""
