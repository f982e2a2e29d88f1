"""Placement experiments: opens models of one node on a provider in a worker process."""
