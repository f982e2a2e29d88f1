"""What is read from a checkpoint: its description, its tensors by name, the formats that they are stored in."""
