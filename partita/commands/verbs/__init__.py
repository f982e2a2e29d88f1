"""What each verb is called, and its arguments and options: a file per verb, with `app`, which `cli.py` adds to its own.

They are read for every command line, so they import typer alone; what a verb does is imported when it is called.
"""
