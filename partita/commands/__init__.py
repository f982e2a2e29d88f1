"""The verbs of the command line, one file each, imported when called. They call the library and print its results."""
