"""GGUF files as checkpoints: header, block types, config, tokenizer and tensor names."""
