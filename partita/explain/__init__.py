"""Everything a report knows about one node."""
