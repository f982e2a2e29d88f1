"""Adapters of PEFT on a checkpoint: read, held against the model, and merged into its weights or put beside them."""
