"""What a folder or file holds, read without running anything and without reading weights: for `partita inspect`."""
