"""Selection of the next token: sampling, on host or device, and speculative decoding."""
