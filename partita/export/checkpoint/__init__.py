"""Reading of checkpoints: description, tensors by name, stored formats."""
