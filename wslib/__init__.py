"""Word sensitivity of random features and attention layers."""
