"""The generation engine: requests in, steps out.

request      one row of the batch: its request and progress
planner      pure function: which rows are in the next step, its graph, and the tokens of each row
cache        one buffer per state
executor     the opened package (`Runner`); bound_graph: buffers of a graph; device_choice: top logits on a device
steady       a decode step of the same rows in the same buffers
drafting     draft tokens of a step
next_tokens  sampling, and verification of draft tokens
loop         schedule, plan, run, sample, until every row has finished
recorder     the steps of the last requests
"""
