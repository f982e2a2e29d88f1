"""Two reports side by side: which node of one is which of the other, and what is different."""
