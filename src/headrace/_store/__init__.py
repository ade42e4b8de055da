"""Object stores: requests, retries, errors, ranges, listings."""
