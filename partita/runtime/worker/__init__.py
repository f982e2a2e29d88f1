"""Worker processes: Python code in a child process that may crash or hang, with messages in both directions."""
