"""Everything a report knows about one node: one file per view."""
