"""Training of one cell, in its rank processes: micro-steps, the core's optimizer, the warm start."""
