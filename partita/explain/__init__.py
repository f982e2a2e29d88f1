"""All facts of a report about one node."""
