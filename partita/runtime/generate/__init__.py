"""The engine: requests in, steps out. Which graph takes which tokens is decided in one place, `planner`.

request    what one row of the batch is asked for, and how far it is
planner    which rows take part in the next step, which graph runs it, and with how many tokens of each row; pure
cache      one buffer per state
executor   the opened package (`Runner`): bound_graph has the buffers of a graph, logits those of its output, and
           device_choice selects the largest logits on a device
steady     the decode step of the same rows in the same buffers
drafting   draft tokens of a step
next_tokens  sampling, and verification of draft tokens
loop       schedule, plan, run, sample, until every row has finished
recorder   the steps of the last requests
"""
