"""What Partita knows about execution providers: one file each, all data. Importing this package imports nothing."""
