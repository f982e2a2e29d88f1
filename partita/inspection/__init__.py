"""What a package or a folder of ONNX files holds, as `partita inspect` shows it: the record and its views."""
