"""Training and distillation of small pairs."""
