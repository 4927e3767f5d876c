"""The models that can be target or draft."""
