"""Access to details of torch that may change with a new release."""
