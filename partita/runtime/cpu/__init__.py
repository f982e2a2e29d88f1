"""How the CPU provider is set up on this machine: threads, spinning, the path through attention."""
