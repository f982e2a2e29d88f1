"""The generation engine: requests in, steps out.

request      one row of the batch: its request and progress
planner      pure function: which rows are in the next step, its graph, and the tokens of each row
cache        one buffer per state; prefixes: states that several prompts share
executor     the opened package (`Runner`); bound_graph: buffers of a graph; graph_capture: recorded decode steps
choice       next tokens: sampling, selection on a device, draft tokens, steady decode steps
loop         schedule, plan, run, sample, until every row has finished
record       steps and profiled runs of the last requests; run_facts: their facts for a report
text         tokenizer, chat templates, stop strings
"""
