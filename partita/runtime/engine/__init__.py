"""The engine: requests in, steps out. Which graph takes which tokens is decided in one place, `planner`.

request    what one row of the batch is asked for, and how far it is
scheduler  which rows take part in the next step
planner    which graph runs it, with how many tokens of each row; pure
cache      one buffer per state, and what may be done with it
executor   feeds a plan to a session and hands out logits: bound_graph has the buffers of a graph, logits what came of a
           run; what of them a device chooses is in choices, and who does it in choosing
drafting   draft tokens of a step, and how many it verifies
loop       schedule, plan, run, sample, until every row has finished
recorder   what is kept of the steps; an observer, which the loop does not know
"""
