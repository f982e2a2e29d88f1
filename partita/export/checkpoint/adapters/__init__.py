"""PEFT adapters: read, matched with the model, and merged into its weights or added as switchable branches."""
