"""Speculative decoding: drafters (`ngram`, `draft`) and the number of draft tokens per step (`length`)."""
