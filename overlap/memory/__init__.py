"""Memory of a step: measured exactly, and predicted from its plan."""
