"""Settings of the CPU provider on this machine: threads, spinning, attention path."""
