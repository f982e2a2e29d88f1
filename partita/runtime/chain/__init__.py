"""The provider chain: opened as it was named, or refused with the nodes that would not go to it."""
