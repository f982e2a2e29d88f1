"""Contents of a package or a folder of ONNX files for `partita inspect`: the record and its views."""
