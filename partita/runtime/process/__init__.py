"""Child processes that may crash or hang, and what becomes of them."""
