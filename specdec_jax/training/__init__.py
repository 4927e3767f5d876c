"""Training and distillation of small target and draft pairs."""
