"""Text to tokens and back: tokenizer, chat templates, stop strings."""
