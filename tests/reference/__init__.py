"""An independent implementation of the raw layout: the oracle for converted checkpoints."""
