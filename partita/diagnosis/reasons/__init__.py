"""Why a node is not on the preferred provider: one table of reasons, and the functions that find their evidence."""
