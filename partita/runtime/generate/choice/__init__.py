"""Choice of the next token: sampling, on the host or on the device, and drafts."""
