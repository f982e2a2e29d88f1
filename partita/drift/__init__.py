"""Where the outputs of a model on one provider differ from those on another: layers, nodes, and a pin that helps."""
