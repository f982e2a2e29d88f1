"""Text to tokens and back: chat templates, stop strings."""
