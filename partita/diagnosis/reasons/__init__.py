"""Why a node is not on the preferred provider: one reason per file, discovered by file name."""
