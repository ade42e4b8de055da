"""Reading from stores: what every dataset over a network shares."""
