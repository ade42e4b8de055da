"""`headrace bench`: what a store gives this machine."""
