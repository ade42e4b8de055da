"""What `headrace doctor` looks at."""
