"""Turn- and token-level credit assignment for stock verl."""
