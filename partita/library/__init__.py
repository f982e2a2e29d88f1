"""The Python API: functions and objects behind the commands. Nothing here prints, exits or parses a command line."""
