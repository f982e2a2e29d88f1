"""Side-by-side measurements. Every figure of one table comes from one run on one machine."""
