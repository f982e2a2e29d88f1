"""The verbs of the command line, one file each, imported when called. They join the rooms; they hold no logic of their
own.
"""
