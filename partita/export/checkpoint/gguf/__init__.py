"""GGUF files as checkpoints: their header, their types of numbers, and the config, tokenizer and names in them."""
