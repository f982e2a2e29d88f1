"""Side-by-side measurements, run by `make bench`. Every figure of one table comes from one run on one machine."""
