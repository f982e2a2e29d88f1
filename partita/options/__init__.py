"""The options of every verb: type, default, range and help of each, in one place."""
