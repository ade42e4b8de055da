"""Random orders and seeds."""
