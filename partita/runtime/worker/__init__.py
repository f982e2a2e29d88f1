"""One worker process: Python code in a child process that may crash or hang, and messages to and from it."""
