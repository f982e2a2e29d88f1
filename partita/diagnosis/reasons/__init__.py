"""Why a node is not on the provider its user wanted most: one reason per file, discovered by file name."""
