"""Why a node is where it is: from the facts of a run to a reason with evidence. Opens nothing, runs nothing."""
