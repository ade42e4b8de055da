"""The tar format: parsing, samples, indices."""
