"""Runs packages: sessions on a provider chain, generation, placement experiments. Imports nothing itself."""
