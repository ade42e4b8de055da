"""The private parts of headrace. Names here may change in any release."""
