"""The engine: requests in, steps out. Which graph takes which tokens is decided in one place, `planner`.

request    what one row of the batch is asked for, and how far it is
scheduler  which rows take part in the next step
planner    which graph runs it, with how many tokens of each row; pure
cache      one buffer per state, and what may be done with it
executor   feeds a plan to a session and hands out logits: bound_graph has the buffers of a graph, logits what came of a
           run, and device_choice selects the largest of them on a device
steady     the decode step of the same rows in the same buffers
drafting   draft tokens of a step, and how many it verifies
loop       schedule, plan, run, sample, until every row has finished
recorder   what is kept of the steps; an observer, which the loop does not know
"""
